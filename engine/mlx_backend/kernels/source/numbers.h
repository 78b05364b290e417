#define INFINITE_BITS 0x7f800000

// A 32-bit bijective hash ("lowbias32", Wellons 2018); noise.py has the same.
INLINE Word mix_bits(Word bits) {
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// log(1 + x), exact near 0: Kahan's correction of the rounding of 1 + x.
INLINE float log_one_plus(float x) {
  const float y = 1.0f + x;
  return y == 1.0f ? x : natural_log(y) * (x / (y - 1.0f));
}
