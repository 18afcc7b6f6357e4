"""Scores are averaged over an image's versions as in airbench."""

from __future__ import annotations

import jordan
import pytest
import torch
from ddpjob_trainer.config.sections import Views
from ddpjob_trainer.errors import ConfigError
from ddpjob_trainer.evaluation.views import over_views
from torch import nn

SHAPE = (3, 32, 32)


def test_views_have_airbenchs_weights() -> None:
    images = torch.randn(4, *SHAPE)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 5)).requires_grad_(False)
    for views, theirs in (
        (Views.MIRROR, jordan.infer_mirror),
        (Views.MIRROR_TRANSLATE, jordan.infer_mirror_translate),
    ):
        wanted = theirs(images, net)
        torch.testing.assert_close(over_views(net, views, SHAPE)(images), wanted)
        assert (wanted - net(images)).abs().max() > 0.1
    assert over_views(net, Views.NONE, (7,)) is net


def test_pixels_that_are_normalized_later_are_shifted_too() -> None:
    """A compiled step gets bytes."""
    pixels = torch.randint(0, 256, (4, *SHAPE), dtype=torch.uint8)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 5)).requires_grad_(False)
    found = over_views(lambda images: net(images.float()), Views.MIRROR_TRANSLATE, SHAPE)(pixels)
    torch.testing.assert_close(found, jordan.infer_mirror_translate(pixels.float(), net))


@pytest.mark.parametrize("shape", [(7,), (3, 1, 8)])
def test_views_of_inputs_that_are_not_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^eval.tta=mirror needs images .* have the shape .*; leave out eval.tta$"):
        over_views(lambda images: images, Views.MIRROR, shape)
