"""What goes on beside a run: logs, learning rate, alarm, benchmarks, summary."""
