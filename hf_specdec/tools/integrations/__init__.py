"""Classes for other projects to call: lm-evaluation-harness and Ray Data. Each module needs its project."""
