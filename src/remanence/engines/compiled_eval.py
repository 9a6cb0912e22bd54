"""A network in evaluation mode, optimized for one core or one GPU.

Images are channels-last. Where steps are compiled, the forward pass is compiled, too, for chunks of
a fixed number of examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from remanence.core.errors import first_line
from remanence.core.memory_format import to_channels_last
from remanence.core.model import Model
from remanence.core.model_layers import depends_on_batch
from remanence.core.types import ModelState, Output
from remanence.engines.memory import is_out_of_memory
from remanence.kernels.compile import compile_graph
from remanence.kernels.torch_internals import make_fx
from remanence.kernels.trace import decompositions

ROWS = {"cpu": 50, "cuda": 2_500}  # examples of a chunk: fit into the cache, or fill the GPU


@dataclass(frozen=True)
class CompiledEvalModel(Model):
    """The same network for evaluation: images channels-last and, if `compiled`, the forward pass
    compiled.

    Where it cannot be compiled, it runs eagerly, and the reason is added to `degraded_reasons`.
    """

    compiled: bool = False
    rows: int = ROWS["cpu"]  # of a chunk
    degraded_reasons: list[str] = field(default_factory=list, compare=False, repr=False)
    # by shape and dtype of an example; None: it cannot be compiled
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
                reason = f"evaluation could not be compiled ({first_line(error)})"
                if reason not in self.degraded_reasons:
                    self.degraded_reasons.append(reason)
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
        outputs: list[Any] = []
        for piece in torch.split(x, self.rows):
            # padding it would more than double it
            short = 2 * len(piece) < self.rows
            outputs.append(
                self._predict_eager(model, piece)
                if short
                else self._predict_chunk(form, model, piece)
            )
        logits, features = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        return Output(logits, features)

    def _predict_chunk(self, form: Any, model: ModelState, piece: Tensor) -> list[Tensor]:
        values = [*model.params.values(), *model.buffers.values()]
        missing = self.rows - len(piece)
        padded = (
            torch.cat([piece, piece[:1].expand(missing, *piece.shape[1:])]) if missing else piece
        )
        if form not in self.traced:
            self.traced[form] = self._trace(model, values, padded)
        return [part[: len(piece)] for part in self.traced[form](*values, padded)]

    def _trace(self, model: ModelState, values: list[Tensor], piece: Tensor) -> Any:
        predict = super().predict

        def flat(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            params = dict(zip(model.params, tensors, strict=False))
            buffers = dict(zip(model.buffers, tensors[len(params) :], strict=False))
            out = predict(ModelState(params, buffers), to_channels_last(tensors[-1]))
            return out.logits, out.features

        graph = make_fx(flat, decompositions())(*(value.detach() for value in values), piece)
        return compile_graph(graph)


def compile_for_eval(
    model: Model, compiled: bool, degraded_reasons: list[str], rows: int = ROWS["cpu"]
) -> Model:
    """A network made fast for evaluation.

    Args:
        model: The network.
        compiled: Compile it? Not done where examples of a batch influence each other, since such
            batches must not be cut.
        degraded_reasons: Gets a sentence where compiling fails.
        rows: Examples of a chunk.
    """
    if any(depends_on_batch(layer) for layer in model.eval_module.modules()):
        compiled = False
    return CompiledEvalModel(
        **{each.name: getattr(model, each.name) for each in fields(Model)},
        compiled=compiled,
        rows=rows,
        degraded_reasons=degraded_reasons,
    )
