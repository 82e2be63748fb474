"""What few runs need: losses of single papers, graders of single benchmarks, imports. The core loads it by name."""
