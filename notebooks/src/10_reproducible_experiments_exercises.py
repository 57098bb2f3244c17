"""The exercises of lesson 10: find the place in the data at which an interrupted run goes on."""

import math

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def order(key, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(key))


def place(step, batches):
    return divmod(step, batches)


def place_swapped(step, batches):
    return step % batches, step // batches


def place_one_less(step, batches):
    return divmod(step - 1, batches)


def rest_of_epoch(seed, epoch, n, consumed):
    return order(1000 * seed + epoch, n)[consumed:]


def rest_of_epoch_seed_alone(seed, epoch, n, consumed):
    return order(seed, n)[consumed:]


def rest_of_epoch_sum(seed, epoch, n, consumed):
    return order(seed + epoch, n)[consumed:]


def rest_of_epoch_epoch_alone(seed, epoch, n, consumed):
    return order(epoch, n)[consumed:]


def rest_of_epoch_key_swapped(seed, epoch, n, consumed):
    return order(1000 * epoch + seed, n)[consumed:]


def rest_of_epoch_already_read(seed, epoch, n, consumed):
    return order(1000 * seed + epoch, n)[:consumed]


def rest_of_epoch_all(seed, epoch, n, consumed):
    return order(1000 * seed + epoch, n)


def rest_of_epoch_one_more(seed, epoch, n, consumed):
    return order(1000 * seed + epoch, n)[consumed + 1 :]


def rest_of_run(seed, step, total, n, batch_size):
    batches = math.ceil(n / batch_size)
    places = [divmod(now, batches) for now in range(step, total)]
    return [order(1000 * seed + epoch, n)[b * batch_size : (b + 1) * batch_size] for epoch, b in places]


def rest_of_run_drops_last(seed, step, total, n, batch_size):
    batches = n // batch_size
    places = [divmod(now, batches) for now in range(step, total)]
    return [order(1000 * seed + epoch, n)[b * batch_size : (b + 1) * batch_size] for epoch, b in places]


def rest_of_run_from_the_start(seed, step, total, n, batch_size):
    return rest_of_run(seed, 0, total - step, n, batch_size)


def rest_of_run_epoch_anew(seed, step, total, n, batch_size):
    start = step - step % math.ceil(n / batch_size)
    return rest_of_run(seed, start, start + total - step, n, batch_size)


def rest_of_run_one_order(seed, step, total, n, batch_size):
    batches = math.ceil(n / batch_size)
    return [order(1000 * seed, n)[now % batches * batch_size :][:batch_size] for now in range(step, total)]


def rest_of_run_skips_one(seed, step, total, n, batch_size):
    return rest_of_run(seed, step + 1, total, n, batch_size)


def rest_of_run_everything(seed, step, total, n, batch_size):
    return rest_of_run(seed, 0, total, n, batch_size)


EXERCISES = (
    Exercise(
        "place",
        place,
        asks="how many whole epochs, and how many batches of the one under way, lie behind so many steps",
        trials=((0, 5), (4, 5), (5, 5), (24, 19)),
        mistakes=(
            Mistake(place_swapped, "the two are in the wrong order. Which of them counts whole passes over the data?"),
            Mistake(place_one_less, "one step less than were taken. What lies behind step 0?"),
        ),
    ),
    Exercise(
        "rest_of_epoch",
        rest_of_epoch,
        asks="the ids of this epoch's own order that have not been read yet",
        trials=((0, 1, 10, 4), (2, 0, 7, 0), (1, 3, 12, 9)),
        mistakes=(
            Mistake(rest_of_epoch_seed_alone, "every epoch has the same order here. What tells them apart?"),
            Mistake(
                rest_of_epoch_sum,
                "seed 0 in its second epoch reads what seed 1 reads in its first. How are the two numbers kept apart?",
            ),
            Mistake(rest_of_epoch_epoch_alone, "every seed has the same orders here. What tells two runs apart?"),
            Mistake(
                rest_of_epoch_key_swapped,
                "no order is shared, but the run before the pause had others. Which key did section 1 give them?",
            ),
            Mistake(rest_of_epoch_already_read, "these have been read. Which part of the order comes after them?"),
            Mistake(rest_of_epoch_all, "the whole epoch once more. How many of its samples were read already?"),
            Mistake(rest_of_epoch_one_more, "one sample is lost. At which index does the first unread one stand?"),
        ),
    ),
    Exercise(
        "rest_of_run",
        rest_of_run,
        asks="the ids of each batch to come, a tensor a step, as the run without a pause reads them",
        trials=((0, 2, 6, 10, 4), (3, 0, 3, 8, 4), (1, 7, 9, 10, 4)),
        mistakes=(
            Mistake(
                rest_of_run_drops_last,
                "an epoch has lost its last, smaller batch, and later ones begin too early. How many batches has one?",
            ),
            Mistake(
                rest_of_run_from_the_start,
                "the run reads on from the very first batch: some samples come twice as often. Where was it?",
            ),
            Mistake(
                rest_of_run_epoch_anew,
                "the epoch under way begins once more. How many of its batches had been consumed?",
            ),
            Mistake(rest_of_run_one_order, "the order of the first epoch serves for all. What names an epoch's own?"),
            Mistake(
                rest_of_run_skips_one, "the first batch is lost. How many steps lie behind a checkpoint of step n?"
            ),
            Mistake(rest_of_run_everything, "that is the whole run. Which of these steps were taken before the pause?"),
        ),
    ),
    Exercise(
        "resume_order",
        ["E", "B", "F", "H", "D", "G", "C", "A"],
        asks="a run goes on as if it had never stopped",
        before=(
            ("E", "B", "the file is loaded before anybody has asked whether it is whole. What would loading tell?"),
            ("B", "D", "a state is put back before it was read. Where does it come from?"),
            ("F", "H", "the optimizer is made before the model. Whose parameters does it hold?"),
            ("H", "D", "a state goes into an optimizer that is not there yet."),
            ("D", "A", "the first step comes before the optimizer has its momentum back. What does that step lack?"),
            ("F", "C", "building the model draws its weights, after the generator's state was put back."),
            ("G", "C", "iter(loader) draws a number, after the generator's state was put back."),
            ("C", "A", "the first step comes before the generator has its state back. Which dropout mask does it get?"),
        ),
    ),
)
