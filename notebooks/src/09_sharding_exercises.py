"""The exercises of lesson 09: how many bytes the fullest rank holds."""

from dxdy_nb.lesson.exercise import Exercise, Mistake


def ddp_bytes(layers, world_size):
    return 16 * sum(layers)


def ddp_bytes_shared(layers, world_size):
    return 16 * sum(layers) / world_size


def ddp_bytes_one_moment(layers, world_size):
    return 12 * sum(layers)


def ddp_bytes_numbers(layers, world_size):
    return 4 * sum(layers)


def zero_bytes(layers, world_size):
    return 8 * sum(layers) + 8 * sum(layers) / world_size


def zero_bytes_all_shared(layers, world_size):
    return 16 * sum(layers) / world_size


def zero_bytes_no_gradients(layers, world_size):
    return 4 * sum(layers) + 8 * sum(layers) / world_size


def zero_bytes_gradients_shared(layers, world_size):
    return 4 * sum(layers) + 12 * sum(layers) / world_size


def zero_bytes_one_moment(layers, world_size):
    return 8 * sum(layers) + 4 * sum(layers) / world_size


def zero_bytes_no_moments(layers, world_size):
    return 8 * sum(layers)


def zero_bytes_not_shared(layers, world_size):
    return 16 * sum(layers)


def fsdp_peak(layers, world_size):
    return 16 * sum(layers) / world_size + 8 * max(layers)


def fsdp_peak_shards(layers, world_size):
    return 16 * sum(layers) / world_size


def fsdp_peak_no_gradient(layers, world_size):
    return 16 * sum(layers) / world_size + 4 * max(layers)


def fsdp_peak_root(layers, world_size):
    return 16 * sum(layers) / world_size + 8 * sum(layers)


def fsdp_peak_layer_shared(layers, world_size):
    return (16 * sum(layers) + 8 * max(layers)) / world_size


def fsdp_peak_last(layers, world_size):
    return 16 * sum(layers) / world_size + 8 * layers[-1]


def fsdp_peak_moments_whole(layers, world_size):
    return 16 * sum(layers) / world_size + 16 * max(layers)


TRIALS = (([120, 480, 60], 2), ([1000], 4), ([24, 96, 12, 36], 3))

EXERCISES = (
    Exercise(
        "ddp_bytes",
        ddp_bytes,
        asks="four bytes for each weight, gradient and moment that a rank holds",
        trials=TRIALS,
        mistakes=(
            Mistake(
                ddp_bytes_shared, "it falls with the number of ranks. What does DDP split: the model, or the data?"
            ),
            Mistake(ddp_bytes_one_moment, "one number a weight is missing. How many moments does Adam keep?"),
            Mistake(
                ddp_bytes_numbers, "that is a count for a model which nobody trains. What does a step need besides?"
            ),
        ),
    ),
    Exercise(
        "zero_bytes",
        zero_bytes,
        asks="what every rank holds whole, and an even share of what the ranks deal out, in bytes",
        trials=TRIALS,
        mistakes=(
            Mistake(
                zero_bytes_all_shared, "everything is shared out here. Which ways do that, in the table of section 3?"
            ),
            Mistake(
                zero_bytes_no_gradients, "after backward each rank holds something more, whole. What does DDP average?"
            ),
            Mistake(
                zero_bytes_gradients_shared, "the gradients are shared out too: that is a later stage than the first."
            ),
            Mistake(
                zero_bytes_one_moment, "the shared part is too small by a factor. How many moments does Adam keep?"
            ),
            Mistake(zero_bytes_no_moments, "nobody holds the moments here. What of them lies on one rank?"),
            Mistake(zero_bytes_not_shared, "the number of ranks plays no part. What do the ranks deal out?"),
        ),
    ),
    Exercise(
        "fsdp_peak",
        fsdp_peak,
        asks="the shards of everything, and beside them the one group that is whole when memory is fullest",
        trials=TRIALS,
        mistakes=(
            Mistake(fsdp_peak_shards, "this is what lies there between two steps. What must be whole to compute?"),
            Mistake(
                fsdp_peak_no_gradient, "in the backward pass the whole layer gets something that is as large. What?"
            ),
            Mistake(fsdp_peak_root, "all layers are whole at once, as if only the root were sharded."),
            Mistake(
                fsdp_peak_layer_shared, "the layer that computes is divided too. Can a rank compute with its rows?"
            ),
            Mistake(fsdp_peak_last, "the last layer decides here. Which layer makes the peak?"),
            Mistake(fsdp_peak_moments_whole, "the moments were made whole. Who uses them, and when?"),
        ),
    ),
    Exercise(
        "line_order",
        ["E", "B", "H", "D", "G", "C", "F", "I", "A"],
        asks="a sharded run that joins the others, resumes, makes a step, and saves",
        before=(
            ("E", "B", "there is no group yet. Among whom is a block cut up?"),
            ("B", "H", "the root is sharded before its blocks, and takes all of their weights as one group."),
            ("H", "D", "the optimizer is made too early. Which parameters does it hold after the next line?"),
            ("D", "G", "the file holds moments as well. Into what are they loaded, before there is an optimizer?"),
            ("G", "C", "a gradient of weights that are thrown away by the load a moment later."),
            ("C", "F", "there is nothing to clip before backward."),
            ("F", "I", "clipped after the step: what did the step use?"),
            ("I", "A", "saved before the step: the file is one update behind."),
        ),
    ),
)
