# SPDX-License-Identifier: Apache-2.0
# The names of this package. Type checkers read this file, and `__init__.py` runs it when one of the names is asked for.
# ruff: noqa: F403 (the public names of each)
from breccia.bridges.awq import *
from breccia.bridges.bitsandbytes import *
from breccia.bridges.comfyui import *
from breccia.bridges.compressed_tensors import *
from breccia.bridges.contract import LIKELY as LIKELY
from breccia.bridges.contract import NAMED as NAMED
from breccia.bridges.contract import NO as NO
from breccia.bridges.contract import Bridge as Bridge
from breccia.bridges.contract import FileFormat as FileFormat
from breccia.bridges.contract import Kind as Kind
from breccia.bridges.contract import Place as Place
from breccia.bridges.contract import Readers as Readers
from breccia.bridges.contract import Sample as Sample
from breccia.bridges.deepseek import *
from breccia.bridges.dlpack import *
from breccia.bridges.file_kinds import Container as Container
from breccia.bridges.file_kinds import Output as Output
from breccia.bridges.file_kinds import WeightFile as WeightFile
from breccia.bridges.fp8 import from_fnuz as from_fnuz
from breccia.bridges.fp8 import to_fnuz as to_fnuz
from breccia.bridges.gguf import *
from breccia.bridges.gpt_oss import *
from breccia.bridges.gptq import *
from breccia.bridges.lookup import *
from breccia.bridges.mlx import *
from breccia.bridges.modelopt import *
from breccia.bridges.native import *
from breccia.bridges.onnx import *
from breccia.bridges.outside import OutsideTensor as OutsideTensor
from breccia.bridges.parts import Found as Found
from breccia.bridges.parts import Part as Part
from breccia.bridges.quark import *
from breccia.bridges.qwix import *
from breccia.bridges.torchao import *
from breccia.bridges.transformer_engine import *
from breccia.bridges.written import InputScale as InputScale
from breccia.bridges.written import Written as Written
