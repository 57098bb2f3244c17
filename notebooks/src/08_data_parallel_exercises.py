"""The exercises of lesson 08: put together what the ranks hold, so that it is what one process would have got."""

import torch

from dxdy_nb.lesson.exercise import Exercise, Mistake


def global_loss(means, counts):
    return sum(m * n for m, n in zip(means, counts, strict=True)) / sum(counts)


def global_loss_mean_of_means(means, counts):
    return sum(means) / len(means)


def global_loss_rank_0(means, counts):
    return means[0]


def global_loss_sum(means, counts):
    return sum(m * n for m, n in zip(means, counts, strict=True))


def scaled_loss(losses, total, world_size):
    return losses.sum() * world_size / total


def scaled_loss_mean(losses, total, world_size):
    return losses.mean()


def scaled_loss_no_world(losses, total, world_size):
    return losses.sum() / total


def scaled_loss_divides(losses, total, world_size):
    return losses.sum() / (total * world_size)


def scaled_loss_upside_down(losses, total, world_size):
    return losses.sum() * total / world_size


def scaled_loss_mean_twice(losses, total, world_size):
    return losses.mean() * world_size / total


def global_gradient(windows):
    total = sum(n for window in windows for _, n in window)
    return sum(g * n for window in windows for g, n in window) / total


def global_gradient_mean(windows):
    gradients = [g for window in windows for g, _ in window]
    return sum(gradients) / len(gradients)


def global_gradient_rank_means(windows):
    per_rank = [sum(g * n for g, n in window) / sum(n for _, n in window) for window in windows]
    return sum(per_rank) / len(per_rank)


def global_gradient_sum(windows):
    return sum(g * n for window in windows for g, n in window)


def global_gradient_unweighted_sum(windows):
    return sum(g for window in windows for g, _ in window)


def global_gradient_rank_0(windows):
    return global_gradient(windows[:1])


def global_gradient_last(windows):
    return global_gradient([window[-1:] for window in windows])


LOSSES = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
GRADIENTS = torch.tensor([[1.0, -2.0], [0.5, 4.0], [3.0, 0.25], [-1.0, 2.0]], dtype=torch.float64)

EXERCISES = (
    Exercise(
        "global_loss",
        global_loss,
        asks="the same number as one process gets that holds all samples: every sample counts alike",
        trials=(([1.0, 3.0], [32, 32]), ([1.0, 3.0], [30, 10]), ([2.0, 0.5, 4.0], [5, 1, 2]), ([0.7], [9])),
        mistakes=(
            Mistake(
                global_loss_mean_of_means,
                "right where the counts are equal, and only there. How much does one sample of the small batch count?",
            ),
            Mistake(global_loss_rank_0, "that is what rank 0 prints. Where are the samples of the others?"),
            Mistake(global_loss_sum, "it grows with the number of samples. By what is a mean divided?"),
        ),
    ),
    Exercise(
        "scaled_loss",
        scaled_loss,
        asks="after the average that DistributedDataParallel takes, every sample of all ranks counts one total-th",
        trials=((LOSSES, 8, 2), (LOSSES, 3, 1), (LOSSES[:1], 12, 3)),
        mistakes=(
            Mistake(
                scaled_loss_mean,
                "this rank's own mean: averaged over ranks, a sample of a small batch counts more than one of a large.",
            ),
            Mistake(
                scaled_loss_no_world,
                "too small by a factor. DistributedDataParallel divides once more: by what?",
            ),
            Mistake(
                scaled_loss_divides,
                "the number of ranks is divided by twice now: here, and in the average. What undoes the second?",
            ),
            Mistake(
                scaled_loss_upside_down, "it grows with the number of samples. Which of the two numbers divides a mean?"
            ),
            Mistake(scaled_loss_mean_twice, "the mean has divided by this rank's count already. Begin with a sum."),
        ),
    ),
    Exercise(
        "global_gradient",
        global_gradient,
        asks="the gradient of the mean over every sample of every micro-batch of every rank",
        trials=(
            ([[(GRADIENTS[0], 4)], [(GRADIENTS[1], 4)]],),
            ([[(GRADIENTS[0], 4), (GRADIENTS[1], 2)], [(GRADIENTS[2], 1)]],),
            ([[(GRADIENTS[0], 3)], [(GRADIENTS[1], 1), (GRADIENTS[2], 5)], [(GRADIENTS[3], 2)]],),
        ),
        mistakes=(
            Mistake(
                global_gradient_mean, "a mean of means: a micro-batch of one sample counts as much as one of four."
            ),
            Mistake(
                global_gradient_rank_means,
                "right inside each rank, and then a mean of the ranks' means. Do all ranks hold equally many samples?",
            ),
            Mistake(global_gradient_sum, "a sum over samples. What makes a mean of it, and over how many ranks?"),
            Mistake(
                global_gradient_unweighted_sum,
                "the counts play no part: the means were added. What turns a mean into a sum over its samples?",
            ),
            Mistake(global_gradient_rank_0, "this is rank 0's window alone. Nothing was reduced."),
            Mistake(
                global_gradient_last,
                "only the last micro-batch of each rank is in it. What does no_sync keep for that one to carry?",
            ),
        ),
    ),
    Exercise(
        "line_order",
        ["D", "F", "A", "H", "C", "G", "B", "E"],
        asks="one process of a data-parallel run, from joining the others to leaving them",
        before=(
            ("D", "F", "the model is wrapped before there is a group. From whom would it get rank 0's weights?"),
            ("F", "H", "a forward pass goes through a model that is not wrapped yet. Who would average its gradients?"),
            ("A", "H", "the epoch is named after its batches were read. Whose order did they have?"),
            ("D", "A", "the sampler is asked for an order before the group exists. How would it know its rank?"),
            ("H", "C", "backward comes before there is a loss. What does it start from?"),
            ("C", "G", "the optimizer steps before backward. Whose gradients are averaged by then?"),
            ("G", "B", "the file is written before the step, with weights that are one update old."),
            ("B", "E", "the group is gone, and a barrier still waits for it. Which line must be the last?"),
        ),
    ),
)
