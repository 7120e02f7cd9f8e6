# SPDX-License-Identifier: Apache-2.0
"""Makes sentencepiece.json: a small model of SentencePiece's (0.2) and the numbers that it gives texts.

python tests_py/data/make_sentencepiece.py
"""

import base64
import json
import tempfile
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent
TEXTS = ["the scale of a block", "naïve ☂ tensors", "  two  spaces, 12345 numbers", "<|turn|>hello<|turn|>"]


def main() -> None:
    lines = [line for name in ("README.md", "docs/concepts.md") for line in (HERE.parents[1] / name).open()]
    lines = [line for line in lines if line.strip() and "|" not in line and "`" not in line][:400]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text("".join(lines))
        sentencepiece.SentencePieceTrainer.train(
            input=f"{folder}/text",
            model_prefix=f"{folder}/model",
            vocab_size=480,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.99,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            user_defined_symbols=["<|turn|>"],
        )
        raw = (Path(folder) / "model.model").read_bytes()
    made = sentencepiece.SentencePieceProcessor(model_proto=raw)
    pieces = [[made.id_to_piece(i), made.get_score(i)] for i in range(made.vocab_size())]
    said = {
        "model": base64.b64encode(raw).decode(),
        "pieces": pieces,
        "ids": {text: made.encode(text) for text in TEXTS},
    }
    (HERE / "sentencepiece.json").write_text(json.dumps(said, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
