"""What a pair would be like before it is downloaded or loaded: catalogue, sizes, memory, likeness, verdict."""
