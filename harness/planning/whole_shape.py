"""The shape of a model's cache, states of hybrids included, from its configuration alone."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.utils import logging

from harness.engine.prepared_model import PreparedModel
from harness.kv.attention import NAME
from harness.kv.compat import shape_of
from harness.kv.shape import ModelShape
from harness.models.weights import without_weights


def whole_shape(config: PretrainedConfig, dtype: torch.dtype) -> ModelShape:
    """The shape of the cache; UserError where the model is not supported.

    A hybrid's states are what its own layers make of a token: they are measured on a model without memory (torch's meta
    device), which computes in `dtype`.
    """
    shape = shape_of(config)
    if not shape.hybrid:
        return shape
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # faster kernels are not what is asked for here
    try:
        model = without_weights(config, dtype, NAME)
        with torch.device("meta"):
            model.config.get_text_config(decoder=True)._experts_implementation = "batched_mm"  # of shapes alone, in every dtype
            return PreparedModel(model.eval(), dtype).shape
    finally:
        logging.set_verbosity(level)
