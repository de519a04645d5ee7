"""Codecs: a gradient to bytes and back, one module per wire format. No TensorFlow in here."""

from hvd_fec.codecs.fec import FecCodec

__all__ = ["FecCodec"]
