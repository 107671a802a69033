"""GPUs to compile for without having one: XLA's GpuTargetConfig, one text file a card."""
