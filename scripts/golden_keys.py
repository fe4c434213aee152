#!/usr/bin/env python3
"""Keys that transformers and PEFT know in the files of a model, for tests of the tables in docs/files.md.

    pip install transformers==5.24.0 peft==0.21.2
    python scripts/golden_keys.py      # writes tests/golden/keys.json

Every key that the configuration class of a served family has must be in our table of `config.json`, every field of
`GenerationConfig` in that of `generation_config.json`, every field of `LoraConfig` in that of `adapter_config.json`.
"""

import dataclasses
import json
import pathlib

from peft import LoraConfig
from transformers import CONFIG_MAPPING, GenerationConfig

FAMILIES = "llama mistral olmo2 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text gemma3 gemma3_text glm glm4 glm4_moe gpt_oss phi3 ministral mistral3"


def main():
    config = {field.name for family in FAMILIES.split() for field in dataclasses.fields(CONFIG_MAPPING[family])}
    keys = {
        "config.json": sorted(config),
        "generation_config.json": sorted(GenerationConfig().__dict__),
        "adapter_config.json": sorted(field.name for field in dataclasses.fields(LoraConfig)),
    }
    path = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "keys.json"
    path.write_text(json.dumps(keys, indent=1) + "\n")
    print(path, {name: len(names) for name, names in keys.items()})


if __name__ == "__main__":
    main()
