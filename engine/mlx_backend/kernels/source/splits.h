#define LOG2_E 1.44269504088896f
#define LOWEST -1.0e30f

// Positions that one split of a context covers: equal shares, whole blocks, at least `least`, so that short rows of a
// batch use few splits. The reduce kernel computes the same.
INLINE int split_span(int num_positions, int num_splits, int block, int least) {
  const int share = max((num_positions + num_splits - 1) / num_splits, least);
  return (share + block - 1) / block * block;
}

// The first position in the pool that a row at `pos` may need: its window's start, down to a whole block.
INLINE int context_start(int pos, int window, int block) {
  const int begin = window > 0 ? max(pos + 1 - window, 0) : 0;
  return begin < pos ? begin / block * block : pos;
}
