// The kernels' dialect on Metal. MLX puts <metal_stdlib>, `using namespace metal` and its number types before this text.
#define DEVICE device
#define THREAD thread
#define SHARED threadgroup
#define INLINE static inline
#define SHARED_ARRAY(type, name, extent) threadgroup type name extent
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define UNROLL _Pragma("clang loop unroll(full)")

typedef long Offset;  // 64 bits: a pool may hold more than 2^31 numbers
typedef uint Word;
typedef half Half;

INLINE float power_of_two(float x) { return exp2(x); }
INLINE float tangent(float x) { return tanh(clamp(x, -15.0f, 15.0f)); }  // overflows to NaN outside
INLINE float natural_log(float x) { return log(x); }
INLINE float inverse_root(float x) { return precise::rsqrt(x); }
INLINE float nearest(float x) { return rint(x); }  // ties to even
INLINE float sine(float x) { return precise::sin(x); }
INLINE float cosine(float x) { return precise::cos(x); }
INLINE float float_of(int bits) { return as_type<float>(bits); }
INLINE float shuffle_xor(float x, int mask) { return simd_shuffle_xor(x, ushort(mask)); }

template <int N, typename T>
INLINE void copy_vector(thread T* to, const device T* from) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

template <int N, typename T>
INLINE void copy_vector(device T* to, const thread T* from) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = from[i];
}

// To threadgroup memory, in the model's numbers.
template <int N, typename To, typename From>
INLINE void convert_vector(threadgroup To* to, const thread From* from) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = To(float(from[i]));
}

template <int N, typename T>
INLINE void stream_vector(thread T* to, const device T* from) {
  copy_vector<N>(to, from);
}

// Matrix tiles, as prelude_cuda.h explains them, in Metal's own spread over the lanes.
INLINE int tile_row(int lane) { return lane / 16 * 4 + lane / 2 % 4; }
INLINE int tile_col(int lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }

template <int N>
INLINE void tile_row_sum(thread float* x) {
  UNROLL
  for (int i = 0; i < N; ++i) {
    x[i] += shuffle_xor(x[i], 1);
    x[i] += shuffle_xor(x[i], 8);
  }
}
template <int N>
INLINE void tile_row_max(thread float* x) {
  UNROLL
  for (int i = 0; i < N; ++i) {
    x[i] = max(x[i], shuffle_xor(x[i], 1));
    x[i] = max(x[i], shuffle_xor(x[i], 8));
  }
}

template <typename T>
INLINE void tile_fma(thread float* c, const thread T* a, const thread T* b) {
  UNROLL
  for (int r = 0; r < 2; ++r) {
    simdgroup_matrix<float, 8, 8> sum;
    sum.thread_elements()[0] = c[r * 2];
    sum.thread_elements()[1] = c[r * 2 + 1];
    UNROLL
    for (int k = 0; k < 2; ++k) {
      simdgroup_matrix<float, 8, 8> x;
      simdgroup_matrix<float, 8, 8> y;
      UNROLL
      for (int e = 0; e < 2; ++e) {
        x.thread_elements()[e] = float(a[(k * 2 + r) * 2 + e]);
        y.thread_elements()[e] = float(b[k * 2 + e]);
      }
      simdgroup_multiply_accumulate(sum, x, y, sum);
    }
    c[r * 2] = sum.thread_elements()[0];
    c[r * 2 + 1] = sum.thread_elements()[1];
  }
}

// Here an operand lies like any tile: row tile_row, columns tile_col and the next.
template <typename T>
INLINE void load_n_rows(thread T* b, const threadgroup T* from, int stride, int lane) {
  UNROLL
  for (int k = 0; k < 2; ++k) {
    UNROLL
    for (int e = 0; e < 2; ++e) b[k * 2 + e] = from[(tile_col(lane) + e) * stride + k * 8 + tile_row(lane)];
  }
}
template <typename T>
INLINE void load_k_rows(thread T* b, const threadgroup T* from, int stride, int lane) {
  UNROLL
  for (int k = 0; k < 2; ++k) {
    UNROLL
    for (int e = 0; e < 2; ++e) b[k * 2 + e] = from[(k * 8 + tile_row(lane)) * stride + tile_col(lane) + e];
  }
}
