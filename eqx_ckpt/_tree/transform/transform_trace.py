"""A traced function as equations, and which inputs each of its outputs depends on."""

import functools as ft
import operator
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import Mesh

from ..._errors import CheckpointError
from .arrangement import Arrangement, Made, Rearranged, rows, View
from .primitives import arranged


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


class _Equation:
    """An equation of a traced function, by itself."""

    def __init__(self, jaxpr: Any, equation: Any) -> None:
        self._alone = jex.ClosedJaxpr(
            jaxpr.replace(
                constvars=(),
                invars=_variables(equation),
                outvars=equation.outvars,
                eqns=[equation],
                debug_info=jaxpr.debug_info.with_unknown_names(),
            ),
            [],
        )

    def __call__(self, *arrays: Any) -> list[Any]:
        return jex.jaxpr_as_fun(self._alone)(*arrays)

    def __str__(self) -> str:
        return str(self._alone)


class _Step(NamedTuple):
    """What makes some variables of others.

    These have numbers. `make` has one result if it is a `Rearranged`.
    """

    make: "Rearranged | _Equation"
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Traced:
    """A function of arrays, of which any part can be computed by itself.

    `inputs`: the arrays, and the parts of them that it uses, in order. These are inputs
    of their own.
    `effects`: the primitives with side effects that it uses.
    """

    def __init__(
        self,
        function: Callable[..., list[Any]],
        structs: Sequence[Any],
        arrays: Sequence[View],
    ) -> None:
        with undisturbed():
            closed = jax.make_jaxpr(function)(*structs)
        self._steps: list[_Step] = []
        # By the number of a variable: the step that makes it, and what that depends
        # on: bit i is set if it is the input i.
        self._maker: dict[int, int] = {}
        self._needs: list[int] = []
        self._constants: dict[int, Any] = {}
        self.inputs: list[View] = []
        # By the number of a variable, which of the inputs it is.
        self._position: dict[int, int] = {}
        self._number_of: dict[Arrangement, int] = {}
        self.effects: list[str] = []
        for view in arrays:
            self._number(view)
        self._outputs = self._inlined(closed, arrays)
        self._wanted = [self._number(array) for array in self._outputs]
        self.effects.sort()

    def _new(self, needs: int) -> int:
        self._needs.append(needs)
        return len(self._needs) - 1

    def _number(self, array: Arrangement) -> int:
        """The number of a variable that is an array."""
        if isinstance(array, Made):
            return array.number
        number = self._number_of.get(array)
        if number is None:
            number = self._number_of[array] = self._added(array)
        return number

    def _added(self, array: Arrangement) -> int:
        if isinstance(array, Rearranged):
            return self._step(array, [*map(self._number, array.parts)], 1)[0]
        assert isinstance(array, View)
        number = self._new(1 << len(self.inputs))
        self._position[number] = len(self.inputs)
        self.inputs.append(array)
        return number

    def _step(
        self, make: "Rearranged | _Equation", inputs: Sequence[int], count: int
    ) -> list[int]:
        # Those of one input are not copied: there may be as many bits as leaves.
        needs = ft.reduce(operator.or_, [self._needs[i] for i in inputs] or [0])
        outputs = [self._new(needs) for _ in range(count)]
        self._maker |= dict.fromkeys(outputs, len(self._steps))
        self._steps.append(_Step(make, tuple(inputs), tuple(outputs)))
        return outputs

    def _inlined(self, closed: Any, inputs: Sequence[Arrangement]) -> list[Arrangement]:
        """Add the equations of a jaxpr, also those inside of `jax.jit`."""
        arrays = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            arrays[variable] = self._constant(value)

        def array(atom: Any) -> Arrangement:
            if isinstance(atom, jex.Literal):
                return self._constant(atom.val)
            return arrays[atom]

        for equation in closed.jaxpr.eqns:
            arguments = [array(atom) for atom in equation.invars]
            if _is_plain_jit(equation):
                results = self._inlined(equation.params["jaxpr"], arguments)
            else:
                results = arranged(
                    equation,
                    arguments,
                    lambda i, given=arguments: self._value(given[i]),
                ) or self._computed(
                    equation, closed.jaxpr, [arrays[x] for x in _variables(equation)]
                )
            arrays |= zip(equation.outvars, results, strict=True)
        return [array(atom) for atom in closed.jaxpr.outvars]

    def _computed(
        self, equation: Any, jaxpr: Any, arguments: Iterable[Arrangement]
    ) -> list[Arrangement]:
        if equation.effects:
            self.effects.append(equation.primitive.name)
        variables = equation.outvars
        inputs = [*map(self._number, arguments)]
        numbers = self._step(_Equation(jaxpr, equation), inputs, len(variables))
        return [
            Made(number, getattr(variable.aval, "shape", ()))
            for number, variable in zip(numbers, variables, strict=True)
        ]

    def _value(self, array: Arrangement) -> int | None:
        """The value of an integer that does not depend on an input."""
        number = self._number(array)
        if self._needs[number]:
            return None
        computation = self._computation([number])
        with undisturbed():
            (value,) = computation([*computation.constants.values()], [])
        return int(value)

    def _constant(self, value: Any) -> Arrangement:
        number = self._new(0)
        self._constants[number] = value
        return Made(number, np.shape(value))

    def unchanged(self, output: int) -> int | None:
        """The input that an output is, if it is one."""
        array = self._outputs[output]
        return self._input(array) if isinstance(array, View) else None

    def joined(self, output: int) -> list[int]:
        """The inputs that an output is, one after another along its first axis.

        Each is some rows of it, or one row; none if it is anything else.
        """
        return [*map(self._input, rows(self._outputs[output]))]

    def _input(self, view: View) -> int:
        return self._position[self._number(view)]

    def inputs_of(self, output: int) -> list[int]:
        """The inputs that an output is computed from."""
        needs = self._needs[self._wanted[output]]
        return [i for i, bit in enumerate(reversed(f"{needs:b}")) if bit == "1"]

    def part(self, outputs: Iterable[int]) -> "Computation":
        """The equations that compute some of the outputs."""
        return self._computation([self._wanted[output] for output in outputs])

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
        return Computation(ordered, sorted(inputs), wanted, constants)


class Computation(NamedTuple):
    """Some steps, from the numbers of `inputs` and constants to `outputs`."""

    steps: Sequence[_Step]
    inputs: Sequence[int]
    outputs: Sequence[int]
    constants: Mapping[int, Any]

    def __call__(self, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Compute the outputs; `constants` are in the place of those of the trace."""
        values = dict(zip(self.constants, constants, strict=True))
        values |= zip(self.inputs, arrays, strict=True)
        for step in self.steps:
            made = step.make(*[values[i] for i in step.inputs])
            results = made if isinstance(step.make, _Equation) else [made]
            values |= zip(step.outputs, results, strict=True)
        return [values[i] for i in self.outputs]

    def __str__(self) -> str:
        """The same text in each process that computes the same."""
        lines = [
            f"{step.outputs} = {step.make} of {step.inputs}" for step in self.steps
        ]
        return _ADDRESS.sub("", "\n".join([*lines, f"returns {self.outputs}"]))


def _variables(equation: Any) -> list[Any]:
    """The variables that an equation reads, each once, without literals."""
    atoms = (atom for atom in equation.invars if not isinstance(atom, jex.Literal))
    return [*dict.fromkeys(atoms)]


def _is_plain_jit(equation: Any) -> bool:
    """Whether an equation is a `jax.jit` without shardings of its own."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    said = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in said)
