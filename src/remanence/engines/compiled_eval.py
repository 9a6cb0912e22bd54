"""A network in evaluation mode as fast as one core, or one GPU, makes it: images channels-last;
where steps are compiled, it is, too, piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from remanence.core.errors import first_line
from remanence.core.memory_format import to_channels_last
from remanence.core.model import Model, depends_on_batch
from remanence.core.types import ModelState, Output
from remanence.engines.memory import is_out_of_memory
from remanence.kernels.compile import compile_graph
from remanence.kernels.torch_internals import make_fx
from remanence.kernels.trace import decompositions

ROWS = {"cpu": 50, "cuda": 2_500}  # of a compiled piece: they fit the cache, or fill the GPU


@dataclass(frozen=True)
class CompiledEvalModel(Model):
    """The same network. Where it cannot be compiled, it is called as it is, and the reason is
    added to `problems`.
    """

    compiled: bool = False
    rows: int = ROWS["cpu"]  # of a compiled piece
    degraded_reasons: list[str] = field(default_factory=list, compare=False, repr=False)
    # by the form of a row; None: cannot be
    traced: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def predict(self, model: ModelState, x: Tensor) -> Output:
        form = (x.shape[1:], x.dtype)
        if self.compiled and len(x) and self.traced.get(form, self) is not None:
            try:
                return self._predict_in_chunks(form, model, x)
            # the compiler may fail in any way, and the network is a user's
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.traced[form] = None
                problem = f"what looks at rows could not be compiled ({first_line(error)})"
                if problem not in self.degraded_reasons:
                    self.degraded_reasons.append(problem)
        return self._predict_eager(model, x)

    def _predict_eager(self, model: ModelState, x: Tensor) -> Output:
        return super().predict(
            ModelState(
                {name: to_channels_last(value) for name, value in model.params.items()},
                model.buffers,
            ),
            to_channels_last(x),
        )

    def _predict_in_chunks(self, form: Any, model: ModelState, x: Tensor) -> Output:
        answers: list[Any] = []
        for piece in torch.split(x, self.rows):
            # more of it would have to be filled up than there is
            short = 2 * len(piece) < self.rows
            answers.append(
                self._predict_eager(model, piece)
                if short
                else self._predict_chunk(form, model, piece)
            )
        logits, features = (torch.cat(parts) for parts in zip(*answers, strict=True))
        return Output(logits, features)

    def _predict_chunk(self, form: Any, model: ModelState, piece: Tensor) -> list[Tensor]:
        values = [*model.params.values(), *model.buffers.values()]
        missing = self.rows - len(piece)
        whole = (
            torch.cat([piece, piece[:1].expand(missing, *piece.shape[1:])]) if missing else piece
        )
        if form not in self.traced:
            self.traced[form] = self._trace(model, values, whole)
        return [part[: len(piece)] for part in self.traced[form](*values, whole)]

    def _trace(self, model: ModelState, values: list[Tensor], piece: Tensor) -> Any:
        judge = super().predict

        def flat(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            params = dict(zip(model.params, tensors, strict=False))
            buffers = dict(zip(model.buffers, tensors[len(params) :], strict=False))
            return tuple(judge(ModelState(params, buffers), to_channels_last(tensors[-1])))  # type: ignore[return-value]

        graph = make_fx(flat, decompositions())(*(value.detach() for value in values), piece)
        return compile_graph(graph)


def compile_for_eval(
    model: Model, compiled: bool, problems: list[str], rows: int = ROWS["cpu"]
) -> Model:
    """`compiled` is not for networks whose rows influence each other: they must not be cut into
    pieces. rows: of a piece
    """
    if any(depends_on_batch(layer) for layer in model.eval_module.modules()):
        compiled = False
    return CompiledEvalModel(
        **{each.name: getattr(model, each.name) for each in fields(Model)},
        compiled=compiled,
        rows=rows,
        degraded_reasons=problems,
    )
