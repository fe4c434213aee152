#!/usr/bin/env python3
"""Writes tests/golden/tools/schemas.json: what transformers makes of the functions beside it. Needs transformers.

    scripts/golden_tools.py
"""
import importlib.util, json, pathlib

from transformers.utils import get_json_schema

folder = pathlib.Path(__file__).parent.parent / "tests/golden/tools"
spec = importlib.util.spec_from_file_location("functions", folder / "functions.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
schemas = {function.__name__: get_json_schema(function) for function in module.FUNCTIONS}
(folder / "schemas.json").write_text(json.dumps(schemas, indent=1) + "\n")
