"""Codecs: a gradient to bytes and back, one module per wire format. No TensorFlow in here."""

from hvd_fec.codecs.fec import FecCodec
from hvd_fec.codecs.ternary import TernaryCodec

__all__ = ["FecCodec", "TernaryCodec"]
