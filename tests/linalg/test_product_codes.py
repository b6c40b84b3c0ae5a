"""Product quantisation: codes against a loop, decoding, ties, and FAISS's own codes."""

from __future__ import annotations

import pytest
import torch

from unmask.linalg.product_codes import decode_codes, has_code, product_codes, sign_centroids

CENTROIDS = torch.randn(4, 8, 3, generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))


def test_codes_are_those_of_a_loop():
    codes = product_codes(VECTORS, CENTROIDS)
    for row, vector in enumerate(VECTORS):
        for part in range(4):
            away = (CENTROIDS[part] - vector[3 * part : 3 * part + 3]).norm(dim=1)
            assert int(codes[row, part]) == int(away.argmin())


def test_a_decoded_vector_has_its_code():
    codes = product_codes(VECTORS, CENTROIDS)
    assert torch.equal(product_codes(decode_codes(codes, CENTROIDS), CENTROIDS), codes)


def test_a_vector_has_its_own_code_and_no_other():
    codes = product_codes(VECTORS, CENTROIDS)
    for row in range(3):
        same = has_code(VECTORS, codes[row : row + 1], CENTROIDS)
        assert torch.equal(same, (codes == codes[row]).all(1))


def test_between_two_centroids_both_pass():
    between = (CENTROIDS[:, 0] + CENTROIDS[:, 1]) / 2
    near = CENTROIDS.clone()
    near[:, 2:] += 100
    for code in (0, 1):
        assert has_code(between.flatten()[None], torch.full((1, 4), code), near).all()


def test_signs_are_codes():
    centroids = sign_centroids(12)
    assert torch.equal(product_codes(VECTORS, centroids), (VECTORS > 0).long())
    assert torch.allclose(decode_codes(product_codes(VECTORS, centroids), centroids).norm(dim=1), torch.ones(20))


def test_codes_are_those_of_faiss():
    faiss = pytest.importorskip("faiss", reason="comes with the extra 'stores'")
    rows = torch.randn(600, 16, generator=torch.Generator().manual_seed(2))
    quantiser = faiss.ProductQuantizer(16, 4, 4)
    quantiser.train(rows.numpy())
    centroids = torch.from_numpy(faiss.vector_to_array(quantiser.centroids).reshape(4, 16, 4))
    packed = torch.from_numpy(quantiser.compute_codes(rows.numpy()))  # two codes of 4 bits a byte
    theirs = torch.stack([packed % 16, packed // 16], 2).flatten(1).long()
    assert torch.equal(product_codes(rows, centroids), theirs)
