"""Prompts that show where speculation shines, and where it does not; for the embedded models, which write Python."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt of the gallery: its name, what it shows, and its text."""

    name: str
    shows: str
    prompt: str


GALLERY: tuple[Example, ...] = (
    Example(
        "A table",
        "Most drafts are right: each line is nearly the one before.",
        """    parser.add_argument("-v", "--verbose", action="store_true", default=False,
                        dest="verbose", help="print more messages")
    parser.add_argument("-q", "--quiet", action="store_true", default=False,
                        dest="quiet", help="print fewer messages")
    parser.add_argument("-f", "--force", action="store_true", default=False,
                        dest="force", help="overwrite existing files")
    parser.add_argument("-n", "--dry-run", action="store_true", default=False,
""",
    ),
    Example(
        "A rename",
        "Most drafts are right: the answer repeats the function above with other names.",
        '''# Before:

def clear(left, right):
    """Remove the names of left that are not in right."""
    for name in sorted(left):
        if name not in right:
            logger.info("removing %s", name)
            left.remove(name)
    return left


# After, with left and right renamed to old and new:

def clear(old, new):
    """Remove the names of old that are not in new."""
    for name in sorted(old):
''',
    ),
    Example(
        "Tests",
        "Many drafts are right: test cases follow one pattern.",
        """class TestQueue(unittest.TestCase):

    def test_put_and_get(self):
        queue = Queue()
        queue.put(1)
        self.assertEqual(queue.get(), 1)

    def test_empty(self):
        queue = Queue()
        self.assertTrue(queue.empty())

    def test_full(self):
""",
    ),
    Example(
        "New code",
        "Little to copy at first: drafts come from what the model thought likely, or from a draft model.",
        '''class Scheduler:
    """Run jobs at given times."""

    def __init__(self, timefunc=time.monotonic):
''',
    ),
    Example(
        "Nothing to copy",
        "Few drafts are right: numbers without a pattern cannot be foreseen. Try it with a temperature of 1.",
        "PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31]\nSALT = b'\\x8f\\x02\\xd1\\x5e\\x77\\xa0\\x3c",
    ),
)
