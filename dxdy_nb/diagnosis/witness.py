"""Hears of a loop through ``observe.hooks``, and takes notes of its objects."""

import copy
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dxdy_nb.diagnosis.observation import Backward, Call, Lost, Observation, Root, Seen, Step, Update, output_of
from dxdy_nb.diagnosis.reading import breaking, graph_nodes, is_shaping, kind_of, misfed, unpacks
from dxdy_nb.diagnosis.sameness import batch_key, equal, is_plain
from dxdy_nb.diagnosis.sequel import Sequel, owned_by
from dxdy_nb.diagnosis.subject import Subject
from dxdy_nb.diagnosis.written import WrittenLoss, given_to_raise, is_multiple
from dxdy_nb.errors import DxdyError
from dxdy_nb.nested import detached, tensors_in
from dxdy_nb.observe.batches import Fetches, likeness
from dxdy_nb.observe.hooks import Careful, listening
from dxdy_nb.observe.row import is_loss

BACK = 0.08  # of the way from the first weights that is left after somebody wrote: learning was undone


ENDED = -1  # in the place of a loader's number


LOADERS = 4  # of different likeness of which a copy is kept, with their data, since a script lets go of its own


KEPT = 2  # steps whose tensors are kept in any case; of later ones


HELD = 64 * 2**20  # as long as these take so many bytes


CALLS = 8  # of a step under way that are kept whole in any case: without a loader, forwards alone never end one


# The innermost of torch.func's transforms that runs: its tensors hold no numbers outside it.
_transform: Callable[[], Any] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


class _Marker:
    """Lives as long as the node of the graph that it is hung on."""

    def __call__(self, *gradients: Any) -> None:
        return None


class Witness:
    """Hears of a loop through ``observe.hooks`` and takes notes of its objects; it changes none of them.

    In a loop that ``diagnose`` drives, each step is begun and ended by it. In anybody's loop a step begins with a batch
    from a loader, and ``subject`` grows with what is seen: the models that run, the optimizers that step.
    """

    given: frozenset[int] = frozenset()

    def __init__(self, subject: Subject | None = None, most: int = 24, held: int = HELD) -> None:
        self.driven = subject is not None
        self.subject = subject or Subject(nn.Module())
        self.most = most
        self.seen = Observation()
        self.step = Step(-1, 0, None)
        self.initial: dict[str, Tensor] = {}  # weights when each model was first seen
        self._loaders: list[tuple[weakref.ref[Any], Any]] = []  # and a copy, where one is kept
        self.caught: list[Any] = []  # warnings
        self._models: list[nn.Module] = []
        self._rng: Tensor | None = None
        self._held, self._may_hold = 0, held
        self._open = 0  # bytes of the calls of the step under way
        self._loader = 0  # number of the one that the last batch came from, from 1 on; ENDED behind an epoch
        self._trained_on: set[int] = set()
        self._evaluated_on: set[int] = set()
        self._batch: Any = None
        self._written = WrittenLoss()
        self.sequel = Sequel()
        self._lost = False
        self._in_backward = self._in_scaler = self._in_step = self._scaling = self._unscaled = False
        self._roots: dict[int, weakref.ref[Tensor]] = {}  # tensors that backward began at, since gradients were cleared
        self._markers: list[weakref.ref[_Marker]] = []
        self._loss_values: list[float] = []
        self._left: dict[str, tuple[Tensor, Tensor]] = {}  # parameters, and weights as the last update left them
        self._at_update: dict[str, tuple[int, int]] = {}  # gradients that an update has used
        self._dirty: set[str] = set()
        self._reached: set[str] = set()  # since the last update
        self._dropped: set[str] = set()  # likewise, and cleared again
        self._plain: set[str] = set()  # parameters whose gradients a scaler has divided by the scale
        self._before: dict[str, Tensor] = {}

    # ---- steps ----

    @property
    def deaf(self) -> bool:
        """Whether enough was heard."""
        return self._lost or _transform() is not None or (not self.driven and len(self.seen.steps) > self.most)

    def _hears(self) -> bool:
        """Return whether what comes after the first steps is heard: what costs nothing to note."""
        return not (self._lost or self._in_backward) and _transform() is None

    @contextmanager
    def careful(self) -> Iterator[None]:
        """Hear no more after an error inside, which is ours and no reason for anybody's loop to stop."""
        try:
            yield
        except Exception as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Hear no more."""
        if not self._lost:
            self.seen.notes.append(f"nothing was heard from step {max(self.step.index, 0)} on: {error!r}")
        self._lost = True
        self._written.forget()
        self.seen.steps = [step for step in self.seen.steps if step is not self.step]
        self.step = Step(-1, 0, None)

    def begin(self, index: int, epoch: int, batch: Any) -> None:
        """Begin a step on a batch."""
        if not self.driven and self.seen.steps and not _trains(self.seen.steps[-1]):
            index = self.seen.steps.pop().index  # a validation's
        self.step = Step(index, epoch, batch)
        self.step.key = batch_key(batch)
        self.seen.steps.append(self.step)
        self._loss_values, self._open = [], 0

    def end(self, value: Any = None) -> None:
        """End the step; ``value`` is what the training step returned."""
        step = self.step
        self._written.forget()
        candidates = [_number(value), *(b.value for b in step.backwards[-1:]), *self._loss_values[-1:]]
        step.value = next((v for v in candidates if not math.isnan(v)), math.nan)
        if step.batch is None and not self.driven:
            step.batch = _given(step)
            step.key = batch_key(step.batch)
        self._held += _bytes(step.batch) + sum(map(_size, (*step.calls, *step.losses)))
        kept = KEPT if self._may_hold else 0
        drop = step.index >= kept and step.error is None and self._held > self._may_hold
        for call in (*step.calls, *step.losses):
            if drop:
                call.args, call.kwargs, call.output = (), {}, None
            _cut(call)
        if drop:
            step.batch = None
        step.graphs = sum(marker() is not None for marker in self._markers[:-2])

    @property
    def window(self) -> int:
        """The most backward calls that an update waited for."""
        counts, count = [0], 0
        for event in self.seen.events:
            count = count + 1 if event == "backward" else 0 if event == "step" else count
            counts.append(count)
        return 1 if "dropped" in self.seen.events else max(counts)

    def loaders(self, held_out: bool = False) -> list[Any]:
        """Return the loaders that are still there: those that were trained on, or only evaluated on."""
        wanted = self._evaluated_on - self._trained_on if held_out else self._trained_on
        known = [loader if (loader := reference()) is not None else copied for reference, copied in self._loaders]
        return [loader for number, loader in enumerate(known, 1) if number in wanted and loader is not None]

    def finish(self, error: BaseException | None = None) -> None:
        """End what was under way in anybody's loop; steps without a training forward were a validation's."""
        self._written.forget()
        if self.step.index >= 0:
            self.step.error = error if isinstance(error, Exception) else None
            self.end()
        steps = [s for s in self.seen.steps if _trains(s) and s.index < self.most]
        # Where some steps go back, a forward alone was none: it made data, or looked at the model.
        self.seen.steps = [s for s in steps if s.backwards or s.updates or s.error] or steps
        for index, step in enumerate(self.seen.steps):
            step.index = index
        now = self.subject.parameters
        self.seen.moved = {n for n, p in self.initial.items() if n in now and not torch.equal(p, now[n].detach())}
        self.seen.final |= self.sequel.facts(self.subject.model, self.seen.steps)
        self._left, self._before, self._batch = {}, {}, None

    # ---- what the hooks tell: each method returns what is entered before the call and left after it ----

    def iterate(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a step with each batch of a loop that nobody drives."""
        if self.driven or not self._hears():
            return begin()
        number = next((n for n, (known, _) in enumerate(self._loaders, 1) if known() is loader), 0)
        if not number:
            like = likeness(loader), id(loader.dataset)
            others = [(likeness(one), id(one.dataset)) for _, one in self._loaders if one is not None]
            keep = not loader.persistent_workers and len(others) < LOADERS and like not in others
            self._loaders.append((weakref.ref(loader), copy.copy(loader) if keep else None))
            number = len(self._loaders)
        elif number in self._trained_on:
            self.step.events.append("epoch")
            self.seen.epochs += 1
        return Fetches(begin(), functools.partial(self._fetch, number))

    def _fetch(self, number: int, batches: Iterator[Any]) -> Any:
        self._loader, self._batch = ENDED, None
        batch = self._batch = next(batches)
        self._loader = number
        with self.careful():
            if not self.deaf:
                if self.step.index >= 0:
                    self.end()
                self.begin(len(self.seen.steps), self.seen.epochs, batch)
        return batch

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note that an outermost module is called."""
        if self.driven:
            self._rng = torch.get_rng_state()
        elif self._hears():
            self._undriven_forward(module)
        if not (self.deaf or self._in_backward or self._is_loss(module)):
            self.step.events.append("forward")

    def _undriven_forward(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled():
            self._evaluated_on.add(self._loader)
            known = self._loader in self._trained_on
            place = None if known and (self._loader or not self.step.updates) else self.step.index * (not self._loader)
            self.sequel.evaluates(module, place, self._models)
            return
        self._trained_on.add(self._loader)
        if self.sequel.resumes(module, self.subject, self._models, self.initial):
            self.most = min(self.most, self.step.index)
        elif not self.deaf:
            self._meet(module)
            anew = self.step.batch is None or self._loader == ENDED
            if self.step.updates and anew and not self._in_step:
                self.end()
                self.begin(len(self.seen.steps), self.seen.epochs, None)
            elif self._loader == ENDED and not _trains(self.step):
                self.step.batch = None  # it was read, and not trained on
            self._rng = torch.get_rng_state()

    def forwarded(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note what it was given and what came out."""
        if self.deaf or self._in_backward or self._is_over():
            return
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        call = Call(module, inputs, named, output, module.training, torch.is_grad_enabled(), dtype, self._rng)
        if self._is_loss(module):
            self._note_loss(call)
        else:
            self._note(self.step.calls, call)
            if not self.driven and call.grad:
                self._written.listen()

    def _is_over(self) -> bool:
        """Return whether this is behind a step: an evaluation."""
        return not self.driven and bool(self.step.updates) and not torch.is_grad_enabled()

    def _meet(self, module: nn.Module) -> None:
        """Make a module that was seen for the first time part of the subject."""
        if any(module is part for m in self._models for part in m.modules()):
            return
        if self._is_loss(module) or not any(True for _ in module.parameters()):
            return
        if any(hasattr(p, "to_local") for p in module.parameters()):
            # To look at them processes would have to wait for each other, and perhaps this one alone is watched.
            raise DxdyError("its parameters are spread over processes")
        before, parts = self.subject.parameters, set(module.modules())
        self._models = [m for m in self._models if m not in parts] + [module]
        names = [type(m).__name__ for m in self._models]
        whole = (
            module
            if len(self._models) == 1
            else nn.ModuleDict(
                {f"{name}{place or ''}": m for place, (name, m) in enumerate(zip(names, self._models, strict=True))}
            )
        )
        self.subject = replace(self.subject, model=whole)
        known = {id(p): self.initial[name] for name, p in before.items()}
        self.initial = {n: known.get(id(p), p.detach()).clone() for n, p in self.subject.parameters.items()}
        self.sequel.meet(module)
        if self.step.index < 0:
            self.begin(0, 0, None)

    def _is_loss(self, module: Any) -> bool:
        return module is self.subject.loss_fn or isinstance(module, nn.modules.loss._Loss)

    def wrapped_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loss function, recorded; a module is returned as it is, since its hooks tell."""
        if isinstance(loss_fn, nn.Module):
            return loss_fn

        @functools.wraps(loss_fn)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = loss_fn(*args, **kwargs)
            if not self.deaf and not torch.compiler.is_compiling():
                self._note_loss(Call(loss_fn, args, kwargs, result, grad=torch.is_grad_enabled()))
            return result

        return recorded

    def loss(self, function: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Note the loss of anybody's loop; in one that is driven the loss function is known."""
        if not (self.driven or self.deaf or self._in_backward or self._is_over()):
            self._note_loss(Call(function, inputs, named, output, grad=torch.is_grad_enabled()))

    def _note_loss(self, call: Call) -> None:
        self.step.events.append("loss")
        self._note(self.step.losses, call)
        self._loss_values.append(_number(call.output))

    def _note(self, calls: list[Call], call: Call) -> None:
        """Add a call to the step; of many the last keep their graphs, and as many as may be held their tensors."""
        if self.driven:
            calls.append(call)
        elif self.step.index >= 0:  # else nothing has trained so far
            calls.append(call)
            self._open += _size(call)
            if len(calls) > CALLS:
                _cut(calls[-CALLS - 1])
                while self._open > self._may_hold and len(calls) > CALLS:
                    self._open -= _size(calls.pop(0))

    @contextmanager
    def backward(self, tensors: Any) -> Iterator[None]:
        """Note what a backward does to the gradients."""
        roots = [tensors] if torch.is_tensor(tensors) else list(tensors)
        if self.deaf or self._in_backward or not roots or not torch.is_tensor(roots[0]):
            yield
            return
        root, parameters = roots[0], self.subject.parameters
        if self._evaluated_on and not (self.driven or self.initial) and root.grad_fn is None:
            self.seen.final["no graph"] = True  # models ran, none of them with gradients
        before = _versions(parameters)
        self._dirty -= {n for n in self._dirty if n not in before}
        self._dirty |= {n for n, v in before.items() if self._at_update.get(n) == v and _any(parameters[n].grad)}
        if not self.driven and (loss := self._written.behind(root)) is not None:
            self._note_loss(loss)
        strangers = _strangers(self._outputs() or [root], self.subject)
        self._plain = {n for n in self._plain if n in parameters and _any(parameters[n].grad)}
        scaled = next((e for e in reversed(self.step.events) if e in ("scale", "unscale")), "") == "scale"
        if not self._in_step or "backward" not in self.step.events:  # a closure asks as often as it likes
            self.step.events.append("backward")
        known = self._roots.get(id(root))
        repeated = known is not None and known() is root
        self._roots[id(root)] = weakref.ref(root)
        if root.grad_fn is not None:
            marker = _Marker()
            root.grad_fn.register_hook(marker)
            self._markers.append(weakref.ref(marker))
            del marker
        if self._may_hold and self.step.index < 2 * KEPT and self.step.root is None:
            self._read(root)
            with suppress(RuntimeError, AttributeError):  # what it kept was written over; or it is somebody's own
                self.step.misfed = self.step.misfed or misfed(root)
        if not (scaled or self._in_step) and is_loss(root) and not math.isfinite(_number(root)):
            self._lose(root)  # a closure may try how far it can go
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
        after = _versions(parameters)
        reached = tuple(n for n, v in after.items() if before.get(n) != v)
        self.step.events += ["mixed"] * (scaled and not self._plain.isdisjoint(reached))
        self._reached.update(n for n in reached if _any(parameters[n].grad))
        value, whole = _number(root), self._loss_values[-1] if self._loss_values else math.nan
        share = value / whole if whole else math.nan
        name = "" if root.grad_fn is None else type(root.grad_fn).__name__
        multiple = bool(self.step.losses) and is_multiple(root, self.step.losses[-1].output)
        self.step.backwards.append(Backward(value, name, repeated, reached, share, multiple, strangers))

    def _outputs(self) -> list[Tensor]:
        """Return what the model has answered: another network that judges it, as a loss does, is no part of it."""
        parts = set(self.subject.model.modules())
        return [t for c in self.step.calls if c.module in parts for t in tensors_in(c.output) if t.grad_fn is not None]

    def _lose(self, root: Tensor) -> None:
        """Note what can be told of a loss that is not finite."""
        if any(step.lost for step in self.seen.steps):
            return
        out = output_of(self.step)
        spoilt = [n for n, p in self.subject.parameters.items() if not _finite(_real(p).float())]
        nodes = graph_nodes(root, None if out is None else out.grad_fn)
        self.step.lost = Lost(_number(root), breaking(nodes), tuple(spoilt))

    def _read(self, root: Tensor) -> None:
        """Note what the loss is, and have its gradient at the output noted when that is known."""
        out = output_of(self.step)
        if out is None or out.grad_fn is None or root.grad_fn is None:
            return
        between = graph_nodes(root, out.grad_fn)
        kind, node = kind_of(between)
        kept = () if unpacks(node) else ("_saved_target", "_saved_weight", "_saved_pos_weight", "_saved_ignore_index")
        saved = SimpleNamespace(**{name: getattr(node, name) for name in kept if hasattr(node, name)})
        parts = [n for n in between if not is_shaping(n)]
        self.step.root = noted = Root(kind, _number(root), saved, direct=bool(kind) and len(parts) <= 4)
        out.register_hook(lambda gradient: setattr(noted, "gradient", gradient.detach().clone()))

    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Note gradients and weights as an update finds them."""
        if not self.driven and self._hears():
            self.sequel.steps(optimizer, self.seen, self.subject, self._batch)
        if self.deaf or not self._may_hold:
            return
        anew = self.step.batch is None or self._loader == ENDED
        if closure and anew and self.step.updates and not self.driven:  # its forward runs inside the step
            self.end()
            self.begin(len(self.seen.steps), self.seen.epochs, None)
            if self.deaf:
                return
        if not self.driven and not any(optimizer is o for o in self.subject.optimizers):
            self.subject = replace(self.subject, optimizers=(*self.subject.optimizers, optimizer))
        parameters = self.subject.parameters
        owned = owned_by(optimizer)
        mine = {n: p for n, p in parameters.items() if id(p) in owned}
        outside = {}
        for name, (owner, left) in self._left.items():
            p = parameters.get(name)
            if p is owner and p.shape == left.shape and not equal(p.detach(), left):
                outside[name] = float((p.detach().double() - left.double()).abs().max())
        lrs = tuple(_number(group.get("lr", math.nan)) for group in optimizer.param_groups)
        seen = {n: _gradient(p) for n, p in mine.items()}
        gone = self._reached | self._dropped
        cleared = tuple(n for n, s in seen.items() if n in gone and not s.norm > 0 and not s.nonfinite)
        dirty = tuple(n for n in mine if n in self._dirty and _any(mine[n].grad))
        kept = {name: weights for name, (_, weights) in self._left.items()}
        back, far = (_distance(outside, w, self.initial) for w in (parameters, kept))
        other = _distance(outside, parameters, kept) > _distance(outside, kept, {})  # weights made anew
        undone = bool(outside) and (back < BACK * far or other)
        training = all(m.training for m in self._models or [self.subject.model] if _holds(m, owned))
        update = Update(optimizer, lrs, seen, outside, undone, dirty, cleared, training)
        update.closure = closure
        self._in_step = True
        update.scaled = self._scaling and not self._unscaled and not self._in_scaler
        # What the last update left is still there, unless somebody wrote: then nothing needs to be copied.
        same = {n for n in mine if n in self._left and self._left[n][0] is mine[n]} - outside.keys()
        self._before = {n: self._left[n][1] if n in same else p.detach().clone() for n, p in mine.items()}
        self.step.updates.append(update)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what the update did."""
        if self.deaf or not self.step.updates:
            return
        update, parameters, self._in_step = self.step.updates[-1], self.subject.parameters, False
        for name, before in self._before.items():
            p = parameters.get(name)
            if p is not None and p.shape == before.shape:
                _movement(update.parameters[name], before, p.detach(), p.grad)
                self._left[name] = p, before.copy_(p.detach())
        self._at_update |= _versions({n: parameters[n] for n in self._before if n in parameters})
        self._dirty -= set(self._before)
        self._reached -= set(self._before)
        self._dropped -= set(self._before)
        self._plain -= set(self._before)
        self._before = {}
        states = [s for s in optimizer.state.values() if isinstance(s, dict) and "step" in s]
        update.state_steps = max((_number(s["step"]) for s in states), default=math.nan)
        self.step.events.append("step")
        self._unscaled = False

    @contextmanager
    def scaled_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Note a scaler's step, and whether it left the optimizer's out."""
        before, self._in_scaler = len(self.step.updates), True
        try:
            yield
        finally:
            self._in_scaler = False
        if scaler.is_enabled() and not self.deaf:
            if len(self.step.updates) == before:
                self.step.events.append("skip")
            self._unscaled = False

    def scale(self, scaler: torch.amp.GradScaler) -> None:
        """Note that a loss is scaled."""
        if scaler.is_enabled() and not self.deaf:
            self._scaling = True
            self.step.events.append("scale")

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Note that gradients lose their scale."""
        if scaler.is_enabled() and not self.deaf:
            self._unscaled = True
            self.step.events.append("unscale")
            held = owned_by(optimizer)
            self._plain |= {n for n, p in self.subject.parameters.items() if id(p) in held}

    def clip(self, norm: Tensor, bound: float) -> None:
        """Note the norm before clipping and its bound."""
        if self.deaf:
            return
        self.step.events.append("clip")
        self.step.clips.append((_number(norm), _number(bound), self._scaling and not self._unscaled))

    @contextmanager
    def zero_grad(self, owner: Any) -> Iterator[None]:
        """Note which gradients are cleared that no update has used."""
        yield
        self.seen.final["cleared by an optimizer"] = isinstance(owner, torch.optim.Optimizer)
        if self.deaf:
            return
        self.step.events.append("zero_grad")
        self._roots.clear()
        parameters = self.subject.parameters
        lost = {n for n in self._reached if n in parameters and not _any(parameters[n].grad)}
        self._reached -= lost
        self._plain -= lost
        self._dropped |= lost
        self.step.events += ["dropped"] * bool(lost)

    def schedule(self, scheduler: Any) -> None:
        """Note a scheduler's step."""
        self.step.events += [] if self.deaf else ["scheduler"]
        trains = {id(group) for o in self.subject.optimizers for group in o.param_groups}
        known = getattr(getattr(self.subject.scheduler, "optimizer", None), "param_groups", ())
        if not self.driven and trains.isdisjoint(map(id, known)):
            self.subject = replace(self.subject, scheduler=scheduler)

    def load(self, module: nn.Module, state: Any) -> None:
        """Note what a model loads."""
        if not self.driven and self._hears():
            self.sequel.loads(module, state, bool(self.seen.updates))

    def reading_gradients(self) -> None:
        """Nothing to note."""

    def item(self) -> None:
        """Nothing to note."""

    def copied(self, seconds: float) -> None:
        """Nothing to note."""

    def forked(self) -> None:
        """Hear no more: this is another process."""
        self.most = -1


@contextmanager
def recording(subject: Subject, held: int = HELD) -> Iterator[Witness]:
    """Record what runs inside the block, and the warnings of it.

    ``held`` bounds the bytes of tensors that are kept beside those of the first two steps; with 0 there are none at
    all, and no notes of updates, which take copies of the weights: only losses.
    """
    witness = Witness(subject, held=held)
    with warnings.catch_warnings(record=True) as caught, listening(witness):
        warnings.simplefilter("always")
        witness.caught = caught
        yield witness


@contextmanager
def witnessing(witness: Witness) -> Iterator[Witness]:
    """Let a witness hear anybody's loop."""
    error: BaseException | None = None
    try:
        with listening(Careful(witness, witness.lose)):
            yield witness
    except BaseException as raised:
        error = raised
        raise
    finally:
        with witness.careful():
            witness.finish(error)


def _bytes(structure: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(structure))


def _size(call: Call) -> int:
    return _bytes((call.args, call.kwargs, call.output))


def _cut(call: Call) -> None:
    """Let go of the graph behind what a call was given and what came out."""
    call.args, call.kwargs, call.output = map(detached, (call.args, call.kwargs, call.output))


def _holds(module: nn.Module, owned: set[int]) -> bool:
    return any(id(p) in owned for p in module.parameters())


def _memory(t: Tensor) -> int:
    return t.data_ptr() if is_plain(t) else id(t)


def _trains(step: Step) -> bool:
    """Return whether a step is one of training, and not of a validation."""
    return bool(step.backwards or step.updates or step.error or any(call.grad for call in step.calls))


def _given(step: Step) -> Any:
    """Return what stands for a batch where no loader gave one: what model and loss were given from outside."""
    outputs = [t for call in step.calls for t in tensors_in(call.output)]
    known = {_memory(t) for t in outputs}
    given = [t for call in step.calls[:1] for t in tensors_in((call.args, call.kwargs))]
    given += [t for loss in step.losses[-1:] for t in tensors_in((loss.args, loss.kwargs)) if t.grad_fn is None]
    given += given_to_raise(step.error) if step.error is not None and step.calls else []
    found = {_memory(t): t.detach() for t in given if _memory(t) not in known and t.dim()}
    return tuple(found.values()) or None


def _versions(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(p.grad), p.grad._version) for name, p in parameters.items() if p.grad is not None}


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def _strangers(roots: list[Tensor], subject: Subject) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the leaves of a graph that nobody trains: neither registered parameters nor owned."""
    known = {id(p) for p in subject.parameters.values()} | subject.owned
    found, seen, todo = [], set(), [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            found.append(tuple(leaf.shape))
        todo += [child for child, _ in node.next_functions]
    return tuple(found)


def _distance(names: Iterable[str], these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> float:
    gaps = (these[n].detach() - those[n].detach() if n in those else these[n].detach() for n in names if n in these)
    return math.hypot(*(float(gap.norm()) for gap in gaps))


def _gradient(p: Tensor) -> Seen:
    if p.grad is None:
        return Seen(math.nan, False, False)
    dense = _real(p.grad)
    norm = float(torch.linalg.vector_norm(dense.float()))
    nonfinite = not math.isfinite(norm) and not bool(torch.isfinite(dense).all())
    return Seen(norm, nonfinite, False, float((dense != 0).float().mean()) if dense.numel() else 0.0)


def _real(t: Tensor) -> Tensor:
    dense = (t.to_dense() if t.is_sparse else t).detach()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _finite(t: Tensor) -> bool:
    return bool(torch.isfinite(t).all())


def _movement(seen: Seen, before: Tensor, after: Tensor, grad: Tensor | None) -> None:
    before, after = _real(before), _real(after)
    changed = before != after
    seen.moved = bool(changed.any())
    was, now = before.float(), after.float()
    change = (now - was).flatten()
    seen.update = float(change.norm())
    seen.weight = float(was.norm())
    seen.spoilt = _finite(was) and not _finite(now)
    if grad is not None and not seen.nonfinite:
        dense = _real(grad).float()
        if dense.shape == before.shape:
            seen.slope = float(change @ dense.flatten())
            pushed = dense != 0
            count = int(pushed.sum())
            seen.stuck = float((pushed & ~changed).sum()) / count if count else 0.0


def _number(value: Any) -> float:
    if torch.is_tensor(value):
        return float(value.detach()) if value.numel() == 1 and not value.is_complex() else math.nan
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
