"""A traced function as equations, and which inputs each of its outputs depends on."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import Mesh

from ..._errors import CheckpointError
from .input_views import View, views_of


_NO_MESH = Mesh(np.empty((), object), ())


@contextmanager
def without_nan_checks() -> Generator[None, None, None]:
    """Treat a saved NaN as a value, not as an error of a computation."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Compute without the caller's mesh, and without its checks."""
    with without_nan_checks(), _without_mesh():
        yield


@contextmanager
def _without_mesh() -> Generator[None, None, None]:
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    try:
        cleared = jax.set_mesh(_NO_MESH)
    except ValueError as e:
        raise CheckpointError(
            "A restore that computes, as for a `transform` or a weakly typed array, is "
            "not possible inside of `jax.jit` under `jax.set_mesh`: call it outside of "
            "one of them."
        ) from e
    with cleared:
        yield


# Parameters that hold a function which an equation calls.
_ADDRESS = re.compile("0x[0-9a-f]+")


class _Step(NamedTuple):
    """An equation; variables have numbers, of which the first ones are the inputs."""

    equation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Traced:
    """A function of arrays, of which any part can be computed by itself.

    `inputs`: the arrays, and the static slices of them that it uses, in order. These
    are inputs of their own.
    `effects`: the primitives with side effects that it uses.
    """

    def __init__(
        self, function: Callable[..., list[Any]], structs: Sequence[Any]
    ) -> None:
        with undisturbed():
            closed = jax.make_jaxpr(function)(*structs)
        self._jaxpr = closed.jaxpr
        self._steps: list[_Step] = []
        # By the number of a variable: the step that makes it, and what that depends
        # on: bit i is set if it is the input i.
        self._maker: dict[int, int] = {}
        self._needs: list[int] = []
        self._constants: dict[int, Any] = {}
        self.inputs: list[View] = []
        # By the number of a variable, which of the inputs it is.
        self._position: dict[int, int] = {}
        self._number_of: dict[View, int] = {}
        arrays = [
            self._input(View.whole(i, struct.shape)) for i, struct in enumerate(structs)
        ]
        self._outputs = self._inlined(closed, arrays)
        self.effects = sorted(
            step.equation.primitive.name
            for step in self._steps
            if step.equation.effects
        )

    def _new(self, needs: int) -> int:
        self._needs.append(needs)
        return len(self._needs) - 1

    def _input(self, view: View) -> int:
        if view not in self._number_of:
            number = self._number_of[view] = self._new(1 << len(self.inputs))
            self._position[number] = len(self.inputs)
            self.inputs.append(view)
        return self._number_of[view]

    def _inlined(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        """Add the equations of a jaxpr, also those inside of `jax.jit`."""
        numbers = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[variable] = self._constant(value)

        def number(atom: Any) -> int:
            if isinstance(atom, jex.Literal):
                return self._constant(atom.val)
            return numbers[atom]

        for equation in closed.jaxpr.eqns:
            if _is_plain_jit(equation):
                arguments = [number(atom) for atom in equation.invars]
                outputs = self._inlined(equation.params["jaxpr"], arguments)
            elif views := self._views(equation, number):
                outputs = [*map(self._input, views)]
            else:
                known = tuple(numbers[x] for x in _variables(equation))
                needs = 0
                for i in known:
                    needs |= self._needs[i]
                outputs = [self._new(needs) for _ in equation.outvars]
                self._maker |= dict.fromkeys(outputs, len(self._steps))
                self._steps.append(_Step(equation, known, tuple(outputs)))
            numbers |= zip(equation.outvars, outputs, strict=True)
        return [number(atom) for atom in closed.jaxpr.outvars]

    def _views(self, equation: Any, number: Callable[[Any], int]) -> list[View]:
        """What an equation returns, if these are static slices of an input."""
        atoms = equation.invars
        position = self._position.get(number(atoms[0])) if atoms else None
        if position is None:
            return []
        return views_of(
            equation, self.inputs[position], lambda i: self._value(number(atoms[i]))
        )

    def _value(self, number: int) -> int | None:
        """The value of an integer that does not depend on an input."""
        if self._needs[number]:
            return None
        computation = self._computation([number])
        with undisturbed():
            (value,) = computation([*computation.constants.values()], [])
        return int(value)

    def _constant(self, value: Any) -> int:
        number = self._new(0)
        self._constants[number] = value
        return number

    def unchanged(self, output: int) -> int | None:
        """The input that an output is, if it is one."""
        return self._position.get(self._outputs[output])

    def joined(self, output: int) -> list[int]:
        """The inputs that an output is, one after another along its first axis.

        Each is some rows of it, or one row; none if it is anything else.
        """
        return self._rows(self._outputs[output])

    def _rows(self, number: int) -> list[int]:
        if number in self._position:
            return [self._position[number]]
        if number not in self._maker:
            return []
        step = self._steps[self._maker[number]]
        if len(step.inputs) < len(step.equation.invars):
            return []
        if _is_stack(step.equation):
            rows = [self._position.get(i) for i in step.inputs]
            return [i for i in rows if i is not None] if None not in rows else []
        if not _is_concatenation(step.equation):
            return []
        parts = [self._rows(i) for i in step.inputs]
        return [i for part in parts for i in part] if all(parts) else []

    def inputs_of(self, output: int) -> list[int]:
        """The inputs that an output is computed from."""
        needs = self._needs[self._outputs[output]]
        return [i for i, bit in enumerate(reversed(f"{needs:b}")) if bit == "1"]

    def part(self, outputs: Iterable[int]) -> "Computation":
        """The equations that compute some of the outputs."""
        return self._computation([self._outputs[output] for output in outputs])

    def position(self, number: int) -> int:
        """Which of the inputs an input of a part is."""
        return self._position[number]

    def _computation(self, wanted: Sequence[int]) -> "Computation":
        steps: set[int] = set()
        todo, known = [*wanted], {*wanted}
        constants: dict[int, Any] = {}
        inputs: set[int] = set()
        while todo:
            number = todo.pop()
            if number in self._constants:
                constants[number] = self._constants[number]
            elif number in self._position:
                inputs.add(number)
            elif self._maker[number] not in steps:
                steps.add(self._maker[number])
                new = {*self._steps[self._maker[number]].inputs} - known
                todo += new
                known |= new
        ordered = [self._steps[i] for i in sorted(steps)]
        return Computation(self._jaxpr, ordered, sorted(inputs), wanted, constants)


class Computation(NamedTuple):
    """Some equations, from the numbers of `inputs` and constants to `outputs`."""

    jaxpr: Any
    steps: Sequence[_Step]
    inputs: Sequence[int]
    outputs: Sequence[int]
    constants: Mapping[int, Any]

    def __call__(self, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Compute the outputs; `constants` are in the place of those of the trace."""
        values = dict(zip(self.constants, constants, strict=True))
        values |= zip(self.inputs, arrays, strict=True)
        for step in self.steps:
            arguments = [values[i] for i in step.inputs]
            results = jex.jaxpr_as_fun(self._alone(step.equation))(*arguments)
            values |= zip(step.outputs, results, strict=True)
        return [values[i] for i in self.outputs]

    def __str__(self) -> str:
        """The same text in each process that computes the same."""
        lines = [
            f"{step.outputs} = {self._alone(step.equation)} of {step.inputs}"
            for step in self.steps
        ]
        return _ADDRESS.sub("", "\n".join([*lines, f"returns {self.outputs}"]))

    def _alone(self, equation: Any) -> Any:
        jaxpr = self.jaxpr.replace(
            constvars=(),
            invars=_variables(equation),
            outvars=equation.outvars,
            eqns=[equation],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return jex.ClosedJaxpr(jaxpr, [])


def _variables(equation: Any) -> list[Any]:
    """The variables that an equation reads, each once, without literals."""
    atoms = (atom for atom in equation.invars if not isinstance(atom, jex.Literal))
    return [*dict.fromkeys(atoms)]


def _is_stack(equation: Any) -> bool:
    """Whether its inputs are the rows of its output."""
    if equation.primitive.name == "broadcast_in_dim":
        shape = equation.invars[0].aval.shape
        dimensions = tuple(equation.params["broadcast_dimensions"])
        is_row = dimensions == tuple(range(1, len(shape) + 1))
        return is_row and equation.params["shape"] == (1, *shape)
    return equation.primitive.name == "stack" and equation.params["axis"] == 0


def _is_concatenation(equation: Any) -> bool:
    is_one = equation.primitive.name == "concatenate"
    return is_one and equation.params["dimension"] == 0


def _is_plain_jit(equation: Any) -> bool:
    """Whether an equation is a `jax.jit` without shardings of its own."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    said = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in said)
