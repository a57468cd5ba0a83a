"""The `teacher-scoring` command: files of reads in, files of scores out, over HTTP. Needs no Ray, PyTorch or vLLM."""
