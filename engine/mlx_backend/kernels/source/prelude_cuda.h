// The kernels' dialect on CUDA. MLX includes its number types before this text.
#define DEVICE
#define THREAD
#define SHARED
#define INLINE static __device__ __forceinline__
// Aligned for loads and stores of 16 bytes.
#define SHARED_ARRAY(type, name, extent) __shared__ alignas(16) type name extent
#define BARRIER() __syncthreads()
#define UNROLL _Pragma("unroll")

typedef long long Offset;
typedef unsigned int Word;
typedef __half Half;

INLINE float power_of_two(float x) { return exp2f(x); }
INLINE float tangent(float x) { return tanhf(x); }
INLINE float natural_log(float x) { return logf(x); }
INLINE float inverse_root(float x) { return rsqrtf(x); }
INLINE float nearest(float x) { return rintf(x); }  // ties to even
INLINE float sine(float x) { return sinf(x); }
INLINE float cosine(float x) { return cosf(x); }
INLINE float float_of(int bits) { return __int_as_float(bits); }
INLINE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

template <int BYTES> struct Packed;
template <> struct Packed<2> { typedef unsigned short Type; };
template <> struct Packed<4> { typedef unsigned int Type; };
template <> struct Packed<8> { typedef uint2 Type; };
template <> struct Packed<16> { typedef uint4 Type; };

// One load and one store; both ends are aligned to the vector.
template <int N, typename T>
INLINE void copy_vector(T* to, const T* from) {
  typedef typename Packed<N * sizeof(T)>::Type Type;
  *reinterpret_cast<Type*>(to) = *reinterpret_cast<const Type*>(from);
}

// To threadgroup memory, in the model's numbers.
template <int N, typename To, typename From>
INLINE void convert_vector(To* to, const From* from) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = To(float(from[i]));
}
template <int N, typename T>
INLINE void convert_vector(T* to, const T* from) {
  copy_vector<N>(to, from);
}

// The same for numbers that are read once: they leave the cache first.
template <int N, typename T>
INLINE void stream_vector(T* to, const T* from) {
  typedef typename Packed<N * sizeof(T)>::Type Type;
  *reinterpret_cast<Type*>(to) = __ldcs(reinterpret_cast<const Type*>(from));
}

// Matrix tiles: c[16][8] += a[16][16] * b[16][8]. Each tile of 8 x 8 numbers is spread over the lanes, two numbers each:
//   a[(k * 2 + r) * 2 + e]  row r * 8 + tile_row, column k * 8 + tile_col + e
//   b[k * 2 + e]            row k * 8 + operand_k(e), column operand_n(e)
//   c[r * 2 + e]            row r * 8 + tile_row, column tile_col + e
INLINE int tile_row(int lane) { return lane >> 2; }
INLINE int tile_col(int lane) { return (lane & 3) * 2; }

// Over the lanes that hold numbers of the same row.
template <int N>
INLINE void tile_row_sum(float* x) {
  UNROLL
  for (int i = 0; i < N; ++i) {
    x[i] += shuffle_xor(x[i], 1);
    x[i] += shuffle_xor(x[i], 2);
  }
}
template <int N>
INLINE void tile_row_max(float* x) {
  UNROLL
  for (int i = 0; i < N; ++i) {
    x[i] = max(x[i], shuffle_xor(x[i], 1));
    x[i] = max(x[i], shuffle_xor(x[i], 2));
  }
}

#define TILE_FMA(T, NAME)                                                                                          \
  INLINE void tile_fma(float* c, const T* a, const T* b) {                                                         \
    const unsigned int* x = reinterpret_cast<const unsigned int*>(a);                                              \
    const unsigned int* y = reinterpret_cast<const unsigned int*>(b);                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                            \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                  \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));                              \
  }
TILE_FMA(__half, "f16")
TILE_FMA(__nv_bfloat16, "bf16")

// b from threadgroup memory that holds its columns as rows, or its rows as rows; `stride` numbers from row to row.
template <typename T>
INLINE void load_n_rows(T* b, const T* from, int stride, int lane) {
  unsigned int* x = reinterpret_cast<unsigned int*>(b);
  const T* row = from + (lane & 7) * stride + (lane >> 3 & 1) * 8;
  const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address));
}
template <typename T>
INLINE void load_k_rows(T* b, const T* from, int stride, int lane) {
  unsigned int* x = reinterpret_cast<unsigned int*>(b);
  const T* row = from + (lane & 15) * stride;
  const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(address));
}
