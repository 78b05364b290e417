// How a layer's pool holds numbers: as they are, or as codes of BITS bits with a scale and a bias for each KV_GROUP of
// them (MLX's affine form). A kernel's text meets pools only here. `at` counts numbers. A piece is what one lane moves at
// once: N numbers, a power of two that divides `at`; of a packed pool at most KV_GROUP.
#define KV_GROUP 32

template <typename P>
struct PlainPool {
  const DEVICE P* numbers;
};
template <int BITS>
struct PackedPool {
  const DEVICE Word* codes;
  const DEVICE Half* scales;
  const DEVICE Half* biases;
};

// As loaded: what it takes to read it as numbers is done in unfold_piece, so that many can be on the way.
template <typename Pool, int N>
struct Piece;
template <typename P, int N>
struct Piece<PlainPool<P>, N> {
  P numbers[N];
};
template <int BITS, int N>
struct Piece<PackedPool<BITS>, N> {
  alignas(N * BITS > 32 ? N * BITS / 8 : 4) Word words[N * BITS > 32 ? N * BITS / 32 : 1];
  Half scale;
  Half bias;
  int shift;  // of the first number's code in its word
};

template <typename P, int N>
INLINE void fetch_piece(THREAD Piece<PlainPool<P>, N>& piece, PlainPool<P> pool, Offset at) {
  copy_vector<N>(piece.numbers, pool.numbers + at);
}
template <int BITS, int N>
INLINE void fetch_piece(THREAD Piece<PackedPool<BITS>, N>& piece, PackedPool<BITS> pool, Offset at) {
  constexpr int PER_WORD = 32 / BITS;
  copy_vector<(N > PER_WORD ? N / PER_WORD : 1)>(piece.words, pool.codes + at / PER_WORD);
  piece.scale = pool.scales[at / KV_GROUP];
  piece.bias = pool.biases[at / KV_GROUP];
  piece.shift = N < PER_WORD ? int(at % PER_WORD) * BITS : 0;
}

template <typename P, int N>
INLINE void unfold_piece(THREAD P* to, const THREAD Piece<PlainPool<P>, N>& piece) {
  UNROLL
  for (int i = 0; i < N; ++i) to[i] = piece.numbers[i];
}
template <typename P, int BITS, int N>
INLINE void unfold_piece(THREAD P* to, const THREAD Piece<PackedPool<BITS>, N>& piece) {
  constexpr int PER_WORD = 32 / BITS;
  const float scale = float(piece.scale);
  const float bias = float(piece.bias);
  UNROLL
  for (int i = 0; i < N; ++i) {
    const Word code = piece.words[i / PER_WORD] >> (piece.shift + i % PER_WORD * BITS) & ((1 << BITS) - 1);
    to[i] = P(scale * float(code) + bias);
  }
}

// The pool's form of `numbers` from `at` on, which belong to whole groups.
template <typename P, int N, typename T>
INLINE void hold_piece(THREAD Piece<PlainPool<P>, N>& piece, const DEVICE T* numbers, Offset at) {
  constexpr int FIT = 16 / int(sizeof(T));
  constexpr int LOADED = N < FIT ? N : FIT;
  UNROLL
  for (int first = 0; first < N; first += LOADED) {
    alignas(16) T loaded[LOADED];
    copy_vector<LOADED>(loaded, numbers + at + first);
    UNROLL
    for (int i = 0; i < LOADED; ++i) piece.numbers[first + i] = P(float(loaded[i]));
  }
}

// The same scale, bias and codes as mx.quantize on the CPU, from fp32: codes count from the end further from zero, which
// is a whole number of steps from it, so that zero has a code.
template <int BITS, int N, typename T>
INLINE void hold_piece(THREAD Piece<PackedPool<BITS>, N>& piece, const DEVICE T* numbers, Offset at) {
  constexpr int PER_WORD = 32 / BITS;
  constexpr float MOST = float((1 << BITS) - 1);
  float low = float_of(INFINITE_BITS);
  float high = -low;
  UNROLL
  for (int first = 0; first < KV_GROUP; first += 4) {
    alignas(16) T loaded[4];
    copy_vector<4>(loaded, numbers + at / KV_GROUP * KV_GROUP + first);
    UNROLL
    for (int i = 0; i < 4; ++i) {
      low = min(low, float(loaded[i]));
      high = max(high, float(loaded[i]));
    }
  }
  const float step = max((high - low) / MOST, 1e-7f);
  const bool from_low = max(low, -low) > max(high, -high);
  const float edge = from_low ? low : high;
  const float signed_step = from_low ? step : -step;
  const float num_steps = nearest(edge / signed_step);
  const float scale = num_steps == 0.0f ? signed_step : edge / num_steps;
  const float bias = num_steps == 0.0f ? 0.0f : edge;
  UNROLL
  for (int i = 0; i < N; ++i) {
    const float code = min(max(nearest((float(numbers[at + i]) - bias) / scale), 0.0f), MOST);
    const Word shifted = Word(code) << (i % PER_WORD * BITS);
    piece.words[i / PER_WORD] = i % PER_WORD == 0 ? shifted : piece.words[i / PER_WORD] | shifted;
  }
  piece.scale = Half(scale);
  piece.bias = Half(bias);
  piece.shift = 0;
}

template <typename P, int N>
INLINE void store_piece(PlainPool<P> pool, Offset at, const THREAD Piece<PlainPool<P>, N>& piece) {
  copy_vector<N>((DEVICE P*)pool.numbers + at, piece.numbers);
}
// Whole words only.
template <int BITS, int N>
INLINE void store_piece(PackedPool<BITS> pool, Offset at, const THREAD Piece<PackedPool<BITS>, N>& piece) {
  constexpr int PER_WORD = 32 / BITS;
  static_assert(N >= PER_WORD, "other lanes' codes are in the word");
  copy_vector<N / PER_WORD>((DEVICE Word*)pool.codes + at / PER_WORD, piece.words);
  if (at % KV_GROUP == 0) {
    ((DEVICE Half*)pool.scales)[at / KV_GROUP] = piece.scale;
    ((DEVICE Half*)pool.biases)[at / KV_GROUP] = piece.bias;
  }
}
