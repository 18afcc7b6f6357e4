"""With fsdp, gathering weights in 16 bits and repeating forward passes do not change the results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ranks import TINY, final_losses, good
from torch import nn

O1 = [*TINY, "train.epochs=1", "model.norm=batch", "data.micro_batches=4", "amp.level=O1", "amp.dtype=bfloat16"]


def watched(folder: Path) -> Callable[[int], None]:
    """Return a hook that counts the forward passes of a rank's layers, by the format of weights."""

    def prepare(rank: int) -> None:
        from ddpjob_trainer.train import Trainer

        passes, train = Counter[str](), Trainer.train
        for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Linear):
            plain = kind.forward

            def forward(self: Any, values: Any, kind: Any = kind, plain: Any = plain) -> Any:
                if self.training:
                    passes[f"{kind.__name__} {self.weight.dtype}"] += 1
                return plain(self, values)

            kind.forward = forward  # type: ignore[method-assign,assignment]

        def counted(self: Trainer) -> int:
            code = train(self)
            (folder / f"passes-{rank}.json").write_text(json.dumps(passes))
            return code

        Trainer.train = counted  # type: ignore[method-assign]

    return prepare


def test_weights_are_gathered_in_16_bits_and_forward_passes_repeated(tmp_path: Path) -> None:
    """Convolutions are in a block. The last layer is not, so only it is computed once.
    Normalization layers keep float32 weights.
    """
    good(1, [*O1, "strategy=single", f"checkpoint.dir={tmp_path / 'alone'}"])
    curve = final_losses(tmp_path / "alone" / "run")
    found = {}
    for name, keys in (("plain", []), ("savings", ["fsdp.short_gathers=true", "fsdp.recompute=true"])):
        folder = tmp_path / name
        folder.mkdir()
        good(2, [*O1, "strategy=fsdp", *keys, f"checkpoint.dir={folder}"], prepare=watched(folder))
        np.testing.assert_allclose(final_losses(folder / "run"), curve, rtol=5e-3)
        found[name], other = (json.loads((folder / f"passes-{rank}.json").read_text()) for rank in (0, 1))
        assert found[name] == other
    convolutions, norms, last = (
        found["plain"][f"{kind} torch.float32"] for kind in ("Conv2d", "BatchNorm2d", "Linear")
    )
    assert found["savings"] == {
        "Conv2d torch.bfloat16": 2 * convolutions,
        "BatchNorm2d torch.float32": 2 * norms,
        "Linear torch.bfloat16": last,
    }
