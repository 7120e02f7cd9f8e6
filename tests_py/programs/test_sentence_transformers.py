# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers saves a model that quantize_ changed, and opens it: sentences give the same vectors."""

from pathlib import Path
from typing import Any

import breccia
import cases
import lora_peer
import numpy as np
import pytest
from breccia.nn import QuantizedLinear

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TEXTS = ["a b a", "b a"]


@pytest.fixture(scope="module")
def peer() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        lora_peer.hide(patch)
        return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model of two layers and its tokenizer of two words."""
    import tokenizers

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=64)).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    return str(folder)


def layers(model: Any) -> int:
    return sum(isinstance(layer, QuantizedLinear) for layer in model.modules())


@cases.ALL
def test_it_saves_and_opens(recipe: Any, peer: Any, bert: str, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    plain = peer.SentenceTransformer(modules=[Transformer(bert), Pooling(128)], device="cpu")
    floats = plain.encode(TEXTS)
    model = breccia.quantize_(plain, recipe)
    vectors = model.encode(TEXTS)
    assert layers(model) == 13  # six in each layer of BERT, and its pooler
    assert not np.array_equal(vectors, floats)
    model.save_pretrained(str(tmp_path))
    again = peer.SentenceTransformer(str(tmp_path), device="cpu")
    assert layers(again) == 13
    np.testing.assert_array_equal(again.encode(TEXTS), vectors)
