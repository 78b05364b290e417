// The kernels' dialect on the CPU: the same text, run thread by thread, to prove it where there is no GPU.
//
// Every GPU thread is a fiber. A simdgroup operation suspends a lane until all 32 lanes of its simdgroup have come to
// the same one; a barrier suspends a thread until the whole threadgroup is there. Fibers run in an order drawn from a
// seed, so that a missing barrier shows as a wrong result. Lanes that do not meet, and threads that leave others waiting
// at a barrier, end the run with an error. Threadgroup memory starts as NaN.
#ifdef __APPLE__
#define _XOPEN_SOURCE 700
#endif
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#define DEVICE
#define THREAD
#define SHARED
#define INLINE static inline
#define UNROLL
#define SHARED_ARRAY(type, name, extent) \
  static type name extent;               \
  emulator::poison_once(&name, sizeof(name))
#define BARRIER() emulator::barrier(__LINE__)

typedef int64_t Offset;
typedef uint32_t Word;

// 16-bit floats by their bits, rounding to nearest even as GPUs do.
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    bits = std::isnan(x) ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t u = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
  }
};

struct float16 {
  uint16_t bits;
  float16() = default;
  explicit float16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint16_t sign = uint16_t(u >> 16 & 0x8000);
    const float size = std::fabs(x);
    if (std::isnan(x)) {
      bits = 0x7e00;
    } else if (size >= 65520.0f) {
      bits = sign | 0x7c00;
    } else if (size < 6.103515625e-5f) {
      bits = sign | uint16_t(std::nearbyint(size * 16777216.0f));  // subnormal: units of 2^-24
    } else {
      const uint32_t rounded = (u & 0x7fffffff) + 0xfff + ((u >> 13) & 1);
      bits = sign | uint16_t((rounded - 0x38000000) >> 13);
    }
  }
  operator float() const {
    const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float x = exponent == 0    ? std::ldexp(float(mantissa), -24)
              : exponent == 31 ? (mantissa ? NAN : INFINITY)
                               : std::ldexp(float(1024 + mantissa), int(exponent) - 25);
    return bits & 0x8000 ? -x : x;
  }
};

typedef float16 Half;

namespace emulator {

enum State { READY, AT_SIMD, AT_BARRIER, DONE };

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  std::vector<char> stack;
  bool started;
  State state;
  int line;     // of the barrier or the simdgroup operation it waits at
  void* data;  // what it gives to a simdgroup operation, changed in place
};

static const int LANES_PER_SIMD = 32;
static std::vector<Fiber> fibers;
static Fiber* current;
static jmp_buf scheduler;
static int group[3], groups[3];
static std::vector<void*> poisoned;
static void (*body)();
static char error[256];

__attribute__((noinline)) static void suspend(State state, int line, void* data) {
  current->state = state;
  current->line = line;
  current->data = data;
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

static void barrier(int line) { suspend(AT_BARRIER, line, nullptr); }

static int thread_index() { return int(current - fibers.data()); }

static void poison_once(void* memory, size_t num_bytes) {
  if (std::find(poisoned.begin(), poisoned.end(), memory) != poisoned.end()) return;
  poisoned.push_back(memory);
  memset(memory, 0xff, num_bytes);
}

static void trampoline() {
  for (;;) {
    body();
    suspend(DONE, 0, nullptr);
  }
}

// Runs one fiber until it waits or ends.
__attribute__((noinline)) static void run(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

typedef void (*Combine)(void** lanes);
static Combine combine;

static void fail(const char* what, int line) { snprintf(error, sizeof(error), "%s (line %d of the source)", what, line); }

// One threadgroup; false on an error.
static bool run_group(int num_threads, std::mt19937& random) {
  poisoned.clear();
  const int num_simds = num_threads / LANES_PER_SIMD;
  std::vector<int> simds(num_simds), lanes(LANES_PER_SIMD);
  std::iota(simds.begin(), simds.end(), 0);
  std::iota(lanes.begin(), lanes.end(), 0);
  for (int i = 0; i < num_threads; ++i) fibers[i].state = READY;
  for (;;) {
    std::shuffle(simds.begin(), simds.end(), random);
    for (int simd : simds) {
      Fiber* first = &fibers[simd * LANES_PER_SIMD];
      // Until the simdgroup waits at a barrier or is done.
      for (;;) {
        std::shuffle(lanes.begin(), lanes.begin() + 4, random);
        std::rotate(lanes.begin(), lanes.begin() + random() % LANES_PER_SIMD, lanes.end());
        bool any = false;
        for (int lane : lanes) {
          if (first[lane].state != READY) continue;
          run(first[lane]);
          any = true;
        }
        if (!any) break;
        int waiting = 0;
        for (int lane = 0; lane < LANES_PER_SIMD; ++lane) waiting += first[lane].state == AT_SIMD;
        if (waiting == 0) continue;
        void* data[LANES_PER_SIMD];
        for (int lane = 0; lane < LANES_PER_SIMD; ++lane) {
          if (first[lane].state != AT_SIMD || first[lane].line != first[0].line) {
            fail("lanes of a simdgroup do not meet at one operation", first[lane].line);
            return false;
          }
          data[lane] = first[lane].data;
        }
        combine(data);
        for (int lane = 0; lane < LANES_PER_SIMD; ++lane) first[lane].state = READY;
      }
    }
    int done = 0, line = 0;
    for (int i = 0; i < num_threads; ++i) {
      done += fibers[i].state == DONE;
      if (fibers[i].state == AT_BARRIER) line = fibers[i].line;
    }
    if (done == num_threads) return true;
    for (int i = 0; i < num_threads; ++i) {
      if (fibers[i].state != AT_BARRIER || fibers[i].line != line) {
        fail("threads of a threadgroup do not meet at one barrier", line);
        return false;
      }
      fibers[i].state = READY;
    }
  }
}

// The whole grid, in threadgroups. Null, or what went wrong.
static const char* launch(void (*kernel)(), const int* num_groups, int num_threads, unsigned seed) {
  body = kernel;
  error[0] = 0;
  fibers = std::vector<Fiber>(num_threads);
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(64 * 1024);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, trampoline, 0);
    fiber.started = false;
  }
  std::mt19937 random(seed);
  std::copy(num_groups, num_groups + 3, groups);
  std::vector<int> order(size_t(num_groups[0]) * num_groups[1] * num_groups[2]);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);  // GPUs promise no order of threadgroups
  for (int index : order) {
    group[0] = index % num_groups[0];
    group[1] = index / num_groups[0] % num_groups[1];
    group[2] = index / num_groups[0] / num_groups[1];
    if (!run_group(num_threads, random)) return error;
  }
  return nullptr;
}

}  // namespace emulator

INLINE int min(int a, int b) { return a < b ? a : b; }
INLINE int max(int a, int b) { return a > b ? a : b; }
INLINE float min(float a, float b) { return std::fmin(a, b); }
INLINE float max(float a, float b) { return std::fmax(a, b); }
INLINE float power_of_two(float x) { return std::exp2(x); }
INLINE float tangent(float x) { return std::tanh(x); }
INLINE float natural_log(float x) { return std::log(x); }
INLINE float inverse_root(float x) { return 1.0f / std::sqrt(x); }
INLINE float nearest(float x) { return std::nearbyint(x); }  // ties to even
INLINE float sine(float x) { return std::sin(x); }
INLINE float cosine(float x) { return std::cos(x); }
INLINE float float_of(int bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

template <int N, typename T>
INLINE void copy_vector(T* to, const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % (N * sizeof(T)) || reinterpret_cast<uintptr_t>(to) % (N * sizeof(T))) {
    fprintf(stderr, "copy_vector: an end is not aligned to the vector\n");
    abort();
  }
  memcpy(to, from, N * sizeof(T));
}

template <int N, typename To, typename From>
INLINE void convert_vector(To* to, const From* from) {
  for (int i = 0; i < N; ++i) to[i] = To(float(from[i]));
}

// Same meaning as shuffles.h; one suspension a call, and the last lane to come does the work of all.
template <int WIDTH, int N, bool MAXIMUM, bool STRIDED>
static void combine_lanes(void** given) {
  float** lanes = reinterpret_cast<float**>(given);
  const int num_sets = STRIDED ? WIDTH : 32 / WIDTH, members = 32 / num_sets;
  for (int i = 0; i < N; ++i) {
    for (int set = 0; set < num_sets; ++set) {
      const int first = STRIDED ? set : set * WIDTH, step = STRIDED ? WIDTH : 1;
      float total = lanes[first][i];
      for (int m = 1; m < members; ++m) {
        const float x = lanes[first + m * step][i];
        total = MAXIMUM ? std::fmax(total, x) : total + x;
      }
      for (int m = 0; m < members; ++m) lanes[first + m * step][i] = total;
    }
  }
}

// A lane's values lie on its own stack; the operation is told apart by its shape.
template <int WIDTH, int N>
INLINE void run_sum(float* x) {
  emulator::combine = combine_lanes<WIDTH, N, false, false>;
  emulator::suspend(emulator::AT_SIMD, 1000 * WIDTH + N, x);
}
template <int WIDTH, int N>
INLINE void stride_sum(float* x) {
  emulator::combine = combine_lanes<WIDTH, N, false, true>;
  emulator::suspend(emulator::AT_SIMD, 100000 + 1000 * WIDTH + N, x);
}
template <int WIDTH, int N>
INLINE void stride_max(float* x) {
  emulator::combine = combine_lanes<WIDTH, N, true, true>;
  emulator::suspend(emulator::AT_SIMD, 200000 + 1000 * WIDTH + N, x);
}

// Matrix tiles as CUDA lays them out (prelude_cuda.h).
INLINE int tile_row(int lane) { return lane / 4; }
INLINE int tile_col(int lane) { return lane % 4 * 2; }
INLINE int operand_k(int lane, int e) { return lane % 4 * 2 + e; }
INLINE int operand_n(int lane, int) { return lane / 4; }

template <int N>
INLINE void tile_row_sum(float* x) {
  run_sum<4, N>(x);
}
template <int N>
INLINE void tile_row_max(float* x) {
  emulator::combine = combine_lanes<4, N, true, false>;
  emulator::suspend(emulator::AT_SIMD, 300000 + N, x);
}

template <typename T>
struct TileOperands {
  float* c;
  const T* a;
  const T* b;
};

template <typename T>
static void combine_tiles(void** lanes) {
  static float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const TileOperands<T>* tile = static_cast<TileOperands<T>*>(lanes[lane]);
    for (int k = 0; k < 2; ++k) {
      for (int e = 0; e < 2; ++e) {
        for (int r = 0; r < 2; ++r)
          a[r * 8 + tile_row(lane)][k * 8 + tile_col(lane) + e] = float(tile->a[(k * 2 + r) * 2 + e]);
        b[k * 8 + operand_k(lane, e)][operand_n(lane, e)] = float(tile->b[k * 2 + e]);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    TileOperands<T>* tile = static_cast<TileOperands<T>*>(lanes[lane]);
    for (int r = 0; r < 2; ++r) {
      for (int e = 0; e < 2; ++e) {
        float total = tile->c[r * 2 + e];
        for (int k = 0; k < 16; ++k) total += a[r * 8 + tile_row(lane)][k] * b[k][tile_col(lane) + e];
        tile->c[r * 2 + e] = total;
      }
    }
  }
}

template <typename T>
INLINE void tile_fma(float* c, const T* a, const T* b) {
  TileOperands<T> operands = {c, a, b};
  emulator::combine = combine_tiles<T>;
  emulator::suspend(emulator::AT_SIMD, 400000, &operands);
}

template <typename T>
INLINE void load_n_rows(T* b, const T* from, int stride, int lane) {
  for (int k = 0; k < 2; ++k)
    for (int e = 0; e < 2; ++e) b[k * 2 + e] = from[operand_n(lane, e) * stride + k * 8 + operand_k(lane, e)];
}
template <typename T>
INLINE void load_k_rows(T* b, const T* from, int stride, int lane) {
  for (int k = 0; k < 2; ++k)
    for (int e = 0; e < 2; ++e) b[k * 2 + e] = from[(k * 8 + operand_k(lane, e)) * stride + operand_n(lane, e)];
}
template <int N, typename T>
INLINE void stream_vector(T* to, const T* from) {
  copy_vector<N>(to, from);
}
