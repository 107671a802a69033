"""Hub config.json files of the presets; the name of a file is the name of a preset."""
