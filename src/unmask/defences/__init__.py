"""Defences: evidence in, evidence out. Each says what it promises; audits measure what it keeps."""

from unmask.defences.aggregate import secure_aggregate
from unmask.defences.clip import clip_norm
from unmask.defences.distortion import Distortion, measure_distortion
from unmask.defences.noise import add_gaussian_noise, add_laplace_noise
from unmask.defences.oracles import (
    BoundedNormOracle,
    NoisyOracle,
    OracleDefence,
    RateLimitedOracle,
    RoundedOracle,
    SignOracle,
    TopKOracle,
    parse_oracle_defence,
)
from unmask.defences.prune import keep_largest, keep_random
from unmask.defences.quantise import quantise_bf16, quantise_fp8, quantise_fp16, quantise_int8
from unmask.defences.table import DEFENCES, Defence, defend_states, parse_defence
from unmask.defences.vector_table import VECTOR_DEFENCES, VectorDefence, parse_vector_defence
from unmask.defences.vectors import add_private_noise, cut_dimensions, keep_signs, rotate_secretly
from unmask.defences.withhold import withhold

__all__ = [
    "DEFENCES",
    "VECTOR_DEFENCES",
    "BoundedNormOracle",
    "Defence",
    "Distortion",
    "NoisyOracle",
    "OracleDefence",
    "RateLimitedOracle",
    "RoundedOracle",
    "SignOracle",
    "TopKOracle",
    "VectorDefence",
    "add_gaussian_noise",
    "add_laplace_noise",
    "add_private_noise",
    "clip_norm",
    "cut_dimensions",
    "defend_states",
    "keep_largest",
    "keep_random",
    "keep_signs",
    "measure_distortion",
    "parse_defence",
    "parse_oracle_defence",
    "parse_vector_defence",
    "quantise_bf16",
    "quantise_fp8",
    "quantise_fp16",
    "quantise_int8",
    "rotate_secretly",
    "secure_aggregate",
    "withhold",
]
