"""Prompts that show where speculation shines, and where it does not: for the embedded models, and for chat models."""

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

CHAT_GALLERY: tuple[Example, ...] = (
    Example(
        "Edit code",
        "Most drafts are right: the answer repeats the function with small changes.",
        '''Add type hints to this function and change nothing else:

```python
def merge(left, right):
    """Merge two sorted lists into one."""
    merged = []
    while left and right:
        if left[0] <= right[0]:
            merged.append(left.pop(0))
        else:
            merged.append(right.pop(0))
    return merged + left + right
```''',
    ),
    Example(
        "Rewrite",
        "Many drafts are right: whole phrases of the message come again.",
        """Correct the spelling of this message:

Dear Ms Berg, thank you for your quick answr. I would like to change the delivery adress of my order to 14 Mill Lane,
and to recieve the parcel after the 12th of May, since we are on holyday until then. Kind regards, Tom Okafor""",
    ),
    Example(
        "Summarise",
        "Names and numbers are copied from the text, the words between them are new.",
        """Summarise this text in two sentences:

The town of Arleth reopened its only road bridge on Monday, eleven months after floodwater carried away two of its five
spans. The new bridge stands four metres higher than the old one and rests on three piers instead of four, so that
drifting trees are less likely to lodge against it. During the closure, school buses took a detour of thirty-eight
kilometres, and two shops on the far bank shut for good.""",
    ),
    Example(
        "Extract",
        "What is asked for stands in the text, and the lines of the list are alike.",
        """List every person in this text with city and year, one a line:

Maria Lopez was born in Valencia in 1968. Peter Anand moved to Leeds in 1999, where he met Clara Whitfield, who had come
from Boston in 1994. Their friend Yuki Sato has lived in Porto since 2011.""",
    ),
    Example(
        "Chat",
        "Little to copy at first: drafts come from what the model thought likely, or from a draft model.",
        "I have tomatoes, eggs and old bread at home. What could I cook for two people in half an hour?",
    ),
)
