// Sums and maxima over lanes, from one primitive: the same text on Metal and CUDA.

// Over aligned runs of WIDTH lanes: every lane gets its run's sum of x[0..N).
template <int WIDTH, int N>
INLINE void run_sum(THREAD float* x) {
  UNROLL
  for (int mask = WIDTH / 2; mask > 0; mask /= 2) {
    UNROLL
    for (int i = 0; i < N; ++i) x[i] += shuffle_xor(x[i], mask);
  }
}

// Over lanes with equal `lane % WIDTH`.
template <int WIDTH, int N>
INLINE void stride_sum(THREAD float* x) {
  UNROLL
  for (int mask = 16; mask >= WIDTH; mask /= 2) {
    UNROLL
    for (int i = 0; i < N; ++i) x[i] += shuffle_xor(x[i], mask);
  }
}

template <int WIDTH, int N>
INLINE void stride_max(THREAD float* x) {
  UNROLL
  for (int mask = 16; mask >= WIDTH; mask /= 2) {
    UNROLL
    for (int i = 0; i < N; ++i) x[i] = max(x[i], shuffle_xor(x[i], mask));
  }
}
