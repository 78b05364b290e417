// Sums and maxima over a whole threadgroup: every thread gets the same bits, whatever else runs.
template <int SIMDS, int N>
INLINE void group_sum(THREAD float* x, SHARED float* scratch, int simd, int lane) {
  run_sum<32, N>(x);
  BARRIER();
  if (lane == 0) {
    UNROLL
    for (int i = 0; i < N; ++i) scratch[simd * N + i] = x[i];
  }
  BARRIER();
  UNROLL
  for (int i = 0; i < N; ++i) {
    float total = 0.0f;
    for (int s = 0; s < SIMDS; ++s) total += scratch[s * N + i];
    x[i] = total;
  }
}

template <int SIMDS>
INLINE float group_max(float x, SHARED float* scratch, int simd, int lane) {
  float top[1] = {x};
  stride_max<1, 1>(top);
  BARRIER();
  if (lane == 0) scratch[simd] = top[0];
  BARRIER();
  float highest = scratch[0];
  for (int s = 1; s < SIMDS; ++s) highest = max(highest, scratch[s]);
  return highest;
}
