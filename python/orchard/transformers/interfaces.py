"""What Orchard needs of Transformers, looked for in one place so that its lack is told in one
message."""

from __future__ import annotations

import inspect

try:
    from transformers import (AttentionInterface as AttentionInterface,
                              AttentionMaskInterface as AttentionMaskInterface,
                              Cache as Cache,
                              PreTrainedConfig as PreTrainedConfig,
                              PreTrainedModel as PreTrainedModel)
    from transformers.masking_utils import (
        and_masks as and_masks,
        bidirectional_mask_function as bidirectional_mask_function,
        causal_mask_function as causal_mask_function,
        eager_mask as eager_mask,
        sdpa_mask as sdpa_mask)
    from transformers.utils.import_utils import is_tracing as is_tracing
except ImportError as _why:
    raise ImportError("orchard.transformers needs Transformers 5.22 or later, whose "
                      f"mask interface cannot be imported: {_why}") from None

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("orchard.transformers needs Transformers 5.22 or later: this "
                      "one does not tell mask functions where the queries stand (q_offset)")

NAME = "orchard"
