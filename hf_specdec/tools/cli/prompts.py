"""The prompts of a command that was given none: Python code, the language of the embedded target, or a question."""

STACK = '''class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        """Put an item on top."""
        self.items.append(item)

    def pop(self):
        """Remove and return the item on top."""
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()


class Queue:
    """A first-in, first-out collection."""

'''

SHAPES = """import math
import unittest

from shapes import Circle, Square


class TestArea(unittest.TestCase):

    def test_circle(self):
        shape = Circle(radius=2)
        self.assertEqual(shape.area(), math.pi * 4)
        self.assertRaises(ValueError, Circle, radius=-1)

    def test_square(self):
"""

CONFIG = '''def read_config(path, section="default"):
    """Return the options of one section as a dictionary."""
    parser = configparser.ConfigParser()
    with open(path, encoding="utf-8") as file:
        parser.read_file(file)
    return dict(parser.items(section))


def write_config(path, options, section="default"):
    """Write a dictionary of options to one section."""
'''

QUESTION = "Write a Python function that removes duplicates from a list and keeps their order. Then explain it."

PROMPTS = (STACK, SHAPES, CONFIG)
