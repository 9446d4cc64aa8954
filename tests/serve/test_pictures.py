"""The new pictures of a step go through the vision tower together, and give what each gives alone."""

import torch

from perilune.serve import pictures
from perilune.serve.pictures import FeatureStore
from perilune.serve.request import Picture
from tests.serve.tiny import model, picture


def shown(*seeds: int) -> list[Picture]:
    return [Picture.of(picture(seed), 0) for seed in seeds]


def test_pictures_looked_at_together_have_the_features_they_have_alone():
    together, alone = FeatureStore(model("pictures")), FeatureStore(model("pictures"))
    together.look_at(shown(0, 1, 2, 1))
    assert len(together) == together.num_looks == 3
    for each in shown(0, 1, 2):
        torch.testing.assert_close(together.features(each), alone.features(each), rtol=1e-12, atol=1e-12)
    assert together.num_looks == 3, "they were kept"


def test_many_pictures_are_looked_at_in_groups_and_known_ones_not_again(monkeypatch):
    monkeypatch.setattr(pictures, "PATCHES_TOGETHER", 20)  # two pictures of 8 patches
    decoder = model("pictures")
    sizes = []
    real = decoder.vision_features

    def watched(pixels, grids):
        sizes.append(len(grids))
        return real(pixels, grids)

    monkeypatch.setattr(decoder, "vision_features", watched)
    store = FeatureStore(decoder)
    store.look_at(shown(0))
    store.look_at(shown(0, 1, 2, 3, 4, 5))
    assert sizes == [1, 2, 2, 1]
    assert store.num_bytes == sum(store.features(each).numel() * 8 for each in shown(0, 1, 2, 3, 4, 5))


def test_a_kept_picture_holds_no_other_in_memory():
    store = FeatureStore(model("pictures"))
    store.look_at(shown(0, 1, 2))
    features = store.features(shown(1)[0])
    assert features.untyped_storage().nbytes() == features.numel() * features.element_size()
