"""Run files (`*.yaml`) and model presets (`models/*.json`) that come with localtrain."""
