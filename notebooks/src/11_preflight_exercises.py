"""The exercises of lesson 11: who reads what, and the order of the six points."""

import math

from dxdy_nb.lesson.exercise import Exercise, Mistake


def read_again(shares):
    reads = [sample for share in shares for sample in share]
    return len(reads) - len(set(reads))


def between_ranks_only(shares):
    reads = [sample for share in shares for sample in set(share)]
    return len(reads) - len(set(reads))


def padding(size, ranks):
    return math.ceil(size / ranks) * ranks - size


def rounded_down(size, ranks):
    return size - size // ranks * ranks


def one_share_more(size, ranks):
    return (size // ranks + 1) * ranks - size


def all_reads(size, ranks):
    return math.ceil(size / ranks) * ranks


def gate(shares, size, *, uneven=True, missing=True, allow=True, twice=True):
    """Return the first word that holds; each keyword leaves out a part of the judgement."""
    reads = [sample for share in shares for sample in share]
    if uneven and len({len(share) for share in shares}) > 1:
        return "uneven"
    if missing and set(range(size)) - set(reads):
        return "missing"
    allowed = padding(size, len(shares)) if allow else 0
    return "twice" if twice and len(reads) - len(set(reads)) > allowed else "none"


def judged(shares, size):
    return gate(shares, size)


def without(**left_out):
    return lambda shares, size: gate(shares, size, **left_out)


def missing_first(shares, size):
    word = gate(shares, size, uneven=False)
    return word if word == "missing" else gate(shares, size)


def counts_only(shares, size):
    reads = sum(map(len, shares))
    return "uneven" if len({len(share) for share in shares}) > 1 else "missing" if reads < size else "none"


EXERCISES = (
    Exercise(
        "read_again",
        read_again,
        asks="the number of reads of a sample that was read before, on this rank or another",
        trials=(([[0, 1], [2, 3]],), ([[0, 1], [1, 2]],), ([[0, 0], [1, 2]],), ([[0, 1], [0, 1], [0, 1]],)),
        mistakes=(Mistake(between_ranks_only, "a sample that one rank reads twice came through."),),
    ),
    Exercise(
        "padding",
        padding,
        asks="the least number of repeated reads with equal shares that leave no sample out",
        trials=((8, 2), (7, 2), (7, 3), (1199, 2), (5, 8)),
        mistakes=(
            Mistake(rounded_down, "samples are left over: nobody reads them. In which direction is a share rounded?"),
            Mistake(one_share_more, "where the division leaves nothing over, no read is repeated. Is it so here?"),
            Mistake(all_reads, "first reads are counted too. How many of the reads are needed?"),
        ),
    ),
    Exercise(
        "gate",
        judged,
        asks="one of the four words, the first that holds",
        trials=(
            ([[0, 1], [2, 3]], 4),
            ([[0, 1], [2, 0]], 3),
            ([[0, 1, 2], [3, 4]], 5),
            ([[0, 1], [0, 1]], 4),
            ([[0, 1, 2], [3, 2, 1]], 4),
            ([[0, 1], [1, 1]], 3),
            ([[0, 1, 2], [0]], 5),
        ),
        mistakes=(
            Mistake(without(uneven=False), "ranks with unequal shares came through. Who waits for whom at the end?"),
            Mistake(without(missing=False), "a sample that nobody reads came through. What do the reads leave out?"),
            Mistake(without(allow=False), "padding was called a fault. How many repeats do equal shares need?"),
            Mistake(without(twice=False), "more repeats than the padding came through."),
            Mistake(missing_first, "shares are unequal, and another word was returned. Which question comes first?"),
            Mistake(counts_only, "the numbers are right and the samples are not. What does a set of them say?"),
        ),
    ),
    Exercise(
        "six_points",
        ["C", "E", "B", "F", "A", "D"],
        asks="an order in which no answer hangs on one that comes later",
        before=(
            ("C", "E", "a gradient is checked before what goes into it. What is it the gradient of?"),
            ("E", "B", "training comes before its gradients are known to be right. What would a falling loss prove?"),
            ("B", "F", "a record is read before there was a training. What stands in it?"),
            ("F", "A", "ranks come before one device has left a record. What would you compare them with?"),
            ("A", "D", "a checkpoint is tried before the ranks that will write it agree. Whose state would it hold?"),
        ),
    ),
)
