"""What benchmarks and sweeps stand on: peers, growth with the context, bandwidth, cost curves, and their reports."""
