"""What a run can tell about itself: its tensors, the bytes it read, when it would not pay, whether it is lossless."""
