"""Keller Jordan's code, copied as a reference for the trainer's parts of the same name.

From https://github.com/KellerJordan/Muon (muon.py) and
https://github.com/KellerJordan/cifar10-airbench (airbench94_muon.py), shortened. Widths, the number
format of the iterations and the image side became arguments, and half precision was removed.

MIT License, Copyright (c) 2024 Keller Jordan. Permission is hereby granted, free of charge, to any
person obtaining a copy of this software and associated documentation files (the "Software"), to
deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions: The above
copyright notice and this permission notice shall be included in all copies or substantial portions
of the Software. The Software is provided "as is", without warranty of any kind, express or implied,
including but not limited to the warranties of merchantability, fitness for a particular purpose and
noninfringement. In no event shall the authors or copyright holders be liable for any claim, damages
or other liability, whether in an action of contract, tort or otherwise, arising from, out of or in
connection with the Software or the use or other dealings in the Software.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def zeropower_via_newtonschulz5(G: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.to(dtype)
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X


class Muon(torch.optim.Optimizer):
    """SingleDeviceMuon of the repository Muon."""

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum, grad, beta = state["momentum_buffer"], p.grad.clone(), group["momentum"]
                momentum.lerp_(grad, 1 - beta)
                update = grad.lerp_(momentum, beta)
                if update.ndim == 4:  # for the case of conv filters
                    update = update.view(len(update), -1)
                update = zeropower_via_newtonschulz5(update, 5, self.dtype)
                update = update * max(1, p.grad.size(-2) / p.grad.size(-1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"])


class AirbenchMuon(torch.optim.Optimizer):
    """Muon of airbench94_muon."""

    def __init__(self, params: Any, lr: float, momentum: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.dtype = dtype

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                g = p.grad
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(g)
                buf = state["momentum_buffer"]
                buf.mul_(momentum).add_(g)
                g = g.add(buf, alpha=momentum)
                p.data.mul_(len(p.data) ** 0.5 / p.data.norm())
                update = zeropower_via_newtonschulz5(g.reshape(len(g), -1), 3, self.dtype).reshape(g.shape)
                p.data.add_(update, alpha=-lr)


class BatchNorm(nn.BatchNorm2d):
    def __init__(self, num_features: int, momentum: float = 0.6, eps: float = 1e-12) -> None:
        super().__init__(num_features, eps=eps, momentum=1 - momentum)
        self.weight.requires_grad = False


class Conv(nn.Conv2d):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=3, padding="same", bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        w = self.weight.data
        torch.nn.init.dirac_(w[: w.size(1)])


class ConvGroup(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels_in, channels_out)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = BatchNorm(channels_out)
        self.conv2 = Conv(channels_out, channels_out)
        self.norm2 = BatchNorm(channels_out)
        self.activ = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activ(self.norm1(self.pool(self.conv1(x))))
        out: torch.Tensor = self.activ(self.norm2(self.conv2(x)))
        return out


class CifarNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2, padding=0, bias=True)
        self.whiten.weight.requires_grad = False
        self.layers = nn.Sequential(
            nn.GELU(),
            ConvGroup(24, width),
            ConvGroup(width, 4 * width),
            ConvGroup(4 * width, 4 * width),
            nn.MaxPool2d(3),
        )
        self.head = nn.Linear(4 * width, 10, bias=False)

    def reset(self) -> None:
        for m in self.modules():
            if type(m) in (nn.Conv2d, Conv, BatchNorm, nn.Linear):
                m.reset_parameters()  # type: ignore[operator]
        w = self.head.weight.data
        w *= 1 / w.std()

    def init_whiten(self, train_images: torch.Tensor, eps: float = 5e-4) -> None:
        c, (h, w) = train_images.shape[1], self.whiten.weight.shape[2:]
        patches = train_images.unfold(2, h, 1).unfold(3, w, 1).transpose(1, 3).reshape(-1, c, h, w).double()
        patches_flat = patches.view(len(patches), -1)
        est_patch_covariance = (patches_flat.T @ patches_flat) / len(patches_flat)
        eigenvalues, eigenvectors = torch.linalg.eigh(est_patch_covariance, UPLO="U")
        eigenvectors_scaled = eigenvectors.T.reshape(-1, c, h, w) / torch.sqrt(eigenvalues.view(-1, 1, 1, 1) + eps)
        self.whiten.weight.data[:] = torch.cat((eigenvectors_scaled, -eigenvectors_scaled))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.whiten(x))
        x = x.view(len(x), -1)
        scores: torch.Tensor = self.head(x) / x.size(-1)
        return scores


def batch_crop(images: torch.Tensor, shifts: torch.Tensor, crop_size: int) -> torch.Tensor:
    """The random shifts became an argument."""
    r = (images.size(-1) - crop_size) // 2
    images_out = torch.empty((len(images), 3, crop_size, crop_size), dtype=images.dtype)
    for sy in range(-r, r + 1):
        for sx in range(-r, r + 1):
            mask = (shifts[:, 0] == sy) & (shifts[:, 1] == sx)
            images_out[mask] = images[mask, :, r + sy : r + sy + crop_size, r + sx : r + sx + crop_size]
    return images_out


def infer_mirror(inputs: torch.Tensor, net: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return 0.5 * net(inputs) + 0.5 * net(inputs.flip(-1))


def infer_mirror_translate(inputs: torch.Tensor, net: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = infer_mirror(inputs, net)
    pad = 1
    padded_inputs = F.pad(inputs, (pad,) * 4, "reflect")
    inputs_translate_list = [
        padded_inputs[:, :, 0:32, 0:32],
        padded_inputs[:, :, 2:34, 2:34],
    ]
    logits_translate_list = [infer_mirror(inputs_translate, net) for inputs_translate in inputs_translate_list]
    logits_translate = torch.stack(logits_translate_list).mean(0)
    return 0.5 * logits + 0.5 * logits_translate
