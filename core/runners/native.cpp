// A pass of the CPU engine in one call: rows of tokens in, hidden states and logits out.
//
// A pass is a program (core/runners/program.py writes it): a short list of steps over row buffers, run by a team of
// threads that meet at a barrier where a step needs what others wrote. What a row comes to, to the last bit, depends on
// that row alone: not on the rows beside it, on how many threads there are, nor on how a text was cut into passes.
//
// Plain C interface, no header but the C library's: compiled once on the machine that runs it, for its instructions.
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

// ---- sixteen numbers at a time: F floats, I integers, B 64 bytes; one set of functions for each instruction set -------

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
INLINE void prefetch(const void* at) { _mm_prefetch((const char*)at, _MM_HINT_T1); }
INLINE void rest() { _mm_pause(); }
#else
INLINE void prefetch(const void* at) { __builtin_prefetch(at); }
INLINE void rest() {}
#endif

#if defined(__AVX512VNNI__)
typedef __m512 F;
typedef __m512i I;
typedef __m512i B;
INLINE F set1(float x) { return _mm512_set1_ps(x); }
INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F divide(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F larger(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F smaller(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F fma16(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F nearest(F x) { return _mm512_roundscale_ps(x, 0); }
INLINE F magnitude(F x) { return _mm512_abs_ps(x); }
INLINE F power_of_two(F n) {  // 2^n, n whole and in -126 … 127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE F lanes(int from, int to, F x, F other) {  // x in lanes from … to-1
  const __mmask16 chosen = (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
  return _mm512_mask_blend_ps(chosen, other, x);
}
INLINE F widen(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE void narrow(bf16* p, F x) {  // to the nearest, ties to even
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
INLINE I zero_i() { return _mm512_setzero_si512(); }
INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
INLINE I to_int(F x) { return _mm512_cvtps_epi32(x); }
INLINE void store_bytes(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
INLINE int total_i(I x) { return _mm512_reduce_add_epi32(x); }
INLINE F high_half(const void* p) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000))); }
INLINE F low_half(const void* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
INLINE B bytes(const void* p) { return _mm512_loadu_si512(p); }
INLINE B low_nibbles(B x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE B high_nibbles(B x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE B look_up(B codes, const int8_t* table) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), codes);
}
INLINE B same4(const int8_t* p) { int32_t four; memcpy(&four, p, 4); return _mm512_set1_epi32(four); }
INLINE I dot(I sum, B unsigned_, B signed_) { return _mm512_dpbusd_epi32(sum, unsigned_, signed_); }
INLINE I dot_levels(I sum, B levels, B signed_) { return dot(sum, levels, signed_); }
#define LEVELS_BIAS 128  // of the levels of NF4 and of codes in 8 bits, which `dot` wants unsigned
INLINE B biased(B x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
#define TILES_OF_ONE 2
#elif defined(__AVX2__)
struct F { __m256 a, b; };
struct I { __m256i a, b; };
typedef I B;
#define BOTH(T, of) T{of(a), of(b)}
INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F divide(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F larger(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F smaller(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F fma16(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F nearest(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 positive(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), x); }
INLINE F magnitude(F x) { return {positive(x.a), positive(x.b)}; }
INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F power_of_two(F n) { return {power_of_two(n.a), power_of_two(n.b)}; }
INLINE __m256 lanes8(int from, int to, __m256 x, __m256 other) {
  const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i chosen = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32(from - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(to), at));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(chosen));
}
INLINE F lanes(int from, int to, F x, F other) {
  return {lanes8(from, to, x.a, other.a), lanes8(from - 8, to - 8, x.b, other.b)};
}
INLINE __m256 widen8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F widen(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
INLINE __m256i narrow8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
INLINE void narrow(bf16* p, F x) {
  const __m256i both = _mm256_packus_epi32(narrow8(x.a), narrow8(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
INLINE I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE void store_bytes(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
INLINE int total_i(I x) {
  int32_t each[8], sum = 0;
  _mm256_storeu_si256((__m256i*)each, _mm256_add_epi32(x.a, x.b));
  for (int i = 0; i < 8; i++) sum += each[i];
  return sum;
}
INLINE __m256i half_bytes(const void* p, int half) { return _mm256_loadu_si256((const __m256i*)p + half); }
INLINE F high_half(const void* p) {
  const __m256i high = _mm256_set1_epi32(0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(half_bytes(p, 0), high)),
          _mm256_castsi256_ps(_mm256_and_si256(half_bytes(p, 1), high))};
}
INLINE F low_half(const void* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(half_bytes(p, 0), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(half_bytes(p, 1), 16))};
}
INLINE B bytes(const void* p) { return {half_bytes(p, 0), half_bytes(p, 1)}; }
INLINE __m256i low4(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE B low_nibbles(B x) { return {low4(x.a), low4(x.b)}; }
INLINE B high_nibbles(B x) { return {low4(_mm256_srli_epi16(x.a, 4)), low4(_mm256_srli_epi16(x.b, 4))}; }
INLINE B look_up(B codes, const int8_t* table) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(all, codes.a), _mm256_shuffle_epi8(all, codes.b)};
}
INLINE B same4(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
}
#if defined(__AVXVNNI__)
INLINE __m256i dot8(__m256i sum, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(sum, u, s); }
INLINE I dot(I sum, B u, B s) { return {dot8(sum.a, u.a, s.a), dot8(sum.b, u.b, s.b)}; }
INLINE I dot_levels(I sum, B levels, B s) { return dot(sum, levels, s); }
#define LEVELS_BIAS 128
INLINE B biased(B x) {
  const __m256i sign = _mm256_set1_epi8((char)0x80);
  return {_mm256_xor_si256(x.a, sign), _mm256_xor_si256(x.b, sign)};
}
#else
INLINE __m256i dot8(__m256i sum, __m256i u, __m256i s) {  // 15 · 127 · 2 is far from the end of 16 bits
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
INLINE I dot(I sum, B u, B s) { return {dot8(sum.a, u.a, s.a), dot8(sum.b, u.b, s.b)}; }
INLINE __m256i dot8_levels(__m256i sum, __m256i l, __m256i s) {  // 127 · 127 · 2 just fits
  return dot8(sum, _mm256_abs_epi8(l), _mm256_sign_epi8(s, l));
}
INLINE I dot_levels(I sum, B l, B s) { return {dot8_levels(sum.a, l.a, s.a), dot8_levels(sum.b, l.b, s.b)}; }
#define LEVELS_BIAS 0
INLINE B biased(B x) { return x; }
#endif
#define TILES_OF_ONE 2
#elif defined(__ARM_NEON)
#include <arm_neon.h>
struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct B { int8x16_t v[4]; };
#define EACH for (int k = 0; k < 4; k++)
INLINE F set1(float x) { F r; EACH r.v[k] = vdupq_n_f32(x); return r; }
INLINE F load(const float* p) { F r; EACH r.v[k] = vld1q_f32(p + 4 * k); return r; }
INLINE void store(float* p, F x) { EACH vst1q_f32(p + 4 * k, x.v[k]); }
INLINE F add(F x, F y) { EACH x.v[k] = vaddq_f32(x.v[k], y.v[k]); return x; }
INLINE F sub(F x, F y) { EACH x.v[k] = vsubq_f32(x.v[k], y.v[k]); return x; }
INLINE F mul(F x, F y) { EACH x.v[k] = vmulq_f32(x.v[k], y.v[k]); return x; }
INLINE F divide(F x, F y) { EACH x.v[k] = vdivq_f32(x.v[k], y.v[k]); return x; }
INLINE F larger(F x, F y) { EACH x.v[k] = vmaxq_f32(x.v[k], y.v[k]); return x; }
INLINE F smaller(F x, F y) { EACH x.v[k] = vminq_f32(x.v[k], y.v[k]); return x; }
INLINE F fma16(F x, F y, F z) { EACH z.v[k] = vfmaq_f32(z.v[k], x.v[k], y.v[k]); return z; }
INLINE F nearest(F x) { EACH x.v[k] = vrndnq_f32(x.v[k]); return x; }
INLINE F magnitude(F x) { EACH x.v[k] = vabsq_f32(x.v[k]); return x; }
INLINE F power_of_two(F n) {
  EACH n.v[k] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[k]), vdupq_n_s32(127)), 23));
  return n;
}
INLINE F lanes(int from, int to, F x, F other) {
  const int32_t first[4] = {0, 1, 2, 3};
  EACH {
    const int32x4_t at = vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * k));
    const uint32x4_t chosen = vandq_u32(vcgeq_s32(at, vdupq_n_s32(from)), vcltq_s32(at, vdupq_n_s32(to)));
    x.v[k] = vbslq_f32(chosen, x.v[k], other.v[k]);
  }
  return x;
}
INLINE F widen(const bf16* p) {
  F r;
  EACH r.v[k] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * k), 16));
  return r;
}
INLINE void narrow(bf16* p, F x) {
  EACH {
    const uint32x4_t bits = vreinterpretq_u32_f32(x.v[k]);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    vst1_u16(p + 4 * k, vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16));
  }
}
INLINE I zero_i() { I r; EACH r.v[k] = vdupq_n_s32(0); return r; }
INLINE F to_float(I x) { F r; EACH r.v[k] = vcvtq_f32_s32(x.v[k]); return r; }
INLINE I to_int(F x) { I r; EACH r.v[k] = vcvtnq_s32_f32(x.v[k]); return r; }
INLINE void store_bytes(int8_t* p, I x) {
  const int16x8_t low = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
INLINE int total_i(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]))); }
INLINE uint32x4_t words(const void* p, int k) { return vld1q_u32((const uint32_t*)p + 4 * k); }
INLINE F high_half(const void* p) {
  F r;
  EACH r.v[k] = vreinterpretq_f32_u32(vandq_u32(words(p, k), vdupq_n_u32(0xffff0000)));
  return r;
}
INLINE F low_half(const void* p) { F r; EACH r.v[k] = vreinterpretq_f32_u32(vshlq_n_u32(words(p, k), 16)); return r; }
INLINE B bytes(const void* p) { B r; EACH r.v[k] = vld1q_s8((const int8_t*)p + 16 * k); return r; }
INLINE B low_nibbles(B x) { EACH x.v[k] = vandq_s8(x.v[k], vdupq_n_s8(15)); return x; }
INLINE B high_nibbles(B x) {
  EACH x.v[k] = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.v[k]), 4));
  return x;
}
INLINE B look_up(B codes, const int8_t* table) {
  EACH codes.v[k] = vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(codes.v[k]));
  return codes;
}
INLINE B same4(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  B r;
  EACH r.v[k] = vreinterpretq_s8_s32(vdupq_n_s32(four));
  return r;
}
#if defined(__ARM_FEATURE_DOTPROD)
INLINE I dot(I sum, B x, B y) { EACH sum.v[k] = vdotq_s32(sum.v[k], x.v[k], y.v[k]); return sum; }
#else
INLINE I dot(I sum, B x, B y) {
  EACH {
    const int16x8_t low = vmull_s8(vget_low_s8(x.v[k]), vget_low_s8(y.v[k]));
    const int16x8_t high = vmull_s8(vget_high_s8(x.v[k]), vget_high_s8(y.v[k]));
    sum.v[k] = vaddq_s32(sum.v[k], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
  }
  return sum;
}
#endif
INLINE I dot_levels(I sum, B x, B y) { return dot(sum, x, y); }
#define LEVELS_BIAS 0
INLINE B biased(B x) { return x; }
#define TILES_OF_ONE 1
#else
#error "no vector instructions that this file knows"
#endif

INLINE float sum_of(F x) {  // by halves, in the same order everywhere
  float v[16];
  store(v, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}
#if defined(__AVX512VNNI__)
INLINE float most_of(F x) { return _mm512_reduce_max_ps(x); }
#else
INLINE float most_of(F x) {
  float v[16], most;
  store(v, x);
  most = v[0];
  for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
  return most;
}
#endif

INLINE F exponential(F x) {  // the polynomial of Cephes' expf; 0 below -87, which spares denormal numbers
  const F least = set1(-87), clipped = smaller(larger(x, least), set1(88));
  const F power = nearest(mul(clipped, set1(1.44269504f)));
  F y = fma16(power, set1(-0.693359375f), clipped);
  y = fma16(power, set1(2.12194440e-4f), y);
  F sum = set1(1.9875691500e-4f);
  sum = fma16(sum, y, set1(1.3981999507e-3f));
  sum = fma16(sum, y, set1(8.3334519073e-3f));
  sum = fma16(sum, y, set1(4.1665795894e-2f));
  sum = fma16(sum, y, set1(1.6666665459e-1f));
  sum = fma16(sum, y, set1(5.0000001201e-1f));
  sum = fma16(sum, y, set1(1));
  sum = fma16(sum, y, set1(1));
  return mul(sum, power_of_two(power));
}

// ---- what a pass is made of: mirrors of the structures in program.py ----------------------------------------------------

enum Kind { FLOAT32, BFLOAT16, INT4, NF4, INT8 };

typedef struct {  // a matrix [16 · tiles, ins], ins a multiple of 32, in tiles of sixteen rows
  int32_t kind, tiles, ins, unused;
  const uint8_t* data;
  const float* bias;  // [16 · tiles] or NULL
} Weight;

enum Op {
  EMBED,    // rows of a table to buffer `to`
  COPY,     // `width` numbers of each row of buffer `from` to the caller's output, from column `at` on
  ENTER,    // buffer `from`, normalised if `norm`, to activations `to` from column `at` on, as the next product reads them
  NORM,     // buffer `from`, normalised, added to `to` (flag ADDED) or put there
  PRODUCT,  // activations `from` times `weight` to buffer `to`, put there or added (flag ADDED)
  GATED,    // the same, of gates and ups in turn by 32 each: activation(gate) · up to activations `to`
  HEADS,    // the same, of queries, keys and values by heads (flag KEYS: not of queries): normalised, turned; keys and
            // values go to the cache
  TURN,     // the second half of HEADS for norms as wide as all heads (flag WIDE): from buffer `to`
  ATTEND,   // queries in buffer `from` to buffer `to`; in a BLOCK a window counts back from the cells that its rows share,
            // and AHEAD they also see those of their own behind their position
  LOGITS,   // the rows of buffer `from` that are wanted, normalised, times `weight` to the caller's logits
};
enum Flag { ADDED = 1, WIDE = 2, GELU = 4, FOR_ALL = 8, KEYS = 16, BLOCK = 32, AHEAD = 64 };
// FOR_ALL: activations that others wrote, too

typedef struct {
  int32_t op, flags, from, to, at, width, kind, layer;
  float eps, factor;  // factor: of EMBED what rows are multiplied by, of ATTEND of scores
  const Weight* weight;
  const float *norm, *other_norm;  // HEADS: of queries and of keys
  const void* table;               // EMBED: bf16 [vocabulary, width], or float32 with flag WIDE
} Step;

typedef struct {  // the build of a network, and its program
  int32_t width, heads, key_heads, size, padded;  // size of a head, and rounded up to sixteen
  int32_t wide_cache;                             // 1: keys and values in float32, 0: bf16
  int32_t buffers, steps;
  const int32_t* widths;  // of buffers, each a multiple of 32
  const Step* step;
} Program;

typedef struct {  // one kind of attention: how far back it sees (0: all), cosines and sines [positions, size / 2]
  const float *cosines, *sines;
  int64_t window;
} Turning;

typedef struct {
  int32_t slot, position, cell, shared;  // row: its text, place in it, cell of the cache; sees cells 0 … shared-1 …
  int32_t own, own_count;                // … and then these, from `own` on, of the pass's list of cells
} Row;

typedef struct {
  int32_t n, first, last, threads;  // rows; the steps run
  int32_t wanted, stride;           // the last `wanted` rows get logits; numbers of a row of COPY's output
  int32_t columns, shares;          // of the logits, how many count; whether shares are asked for
  const int64_t* ids;
  const Row* rows;
  const int32_t* cells;
  void* const* caches;         // of each slot: [layers, 2, key heads, capacity, padded]
  const int64_t* capacities;   // of each slot
  const Turning* turnings;
  float* const* buffers;       // [n, width] each, the caller's
  uint8_t* const* activations; // the caller's: two for all, and then two for each thread, for up to four rows
  float* output;               // of COPY: [n, stride]
  float* logits;               // [wanted, 16 · tiles of the head]
  int64_t* likeliest;          // [wanted], the column of the largest logit, the first of equal ones; or NULL
  float* told;                 // [2, wanted]: that logit, and its share of the softmax
} Pass;

#define GROUP 32
#define TILE_BYTES(kind) ((kind) == INT8 ? 576 : 320)  // of a group of 32 columns: codes, and 64 of scales

// Activations of n rows for a weight of `ins` columns. In 8 bits: codes [n, ins], then scales and sums [n, ins / 32] of
// the groups; else bf16 or float32 [n, ins].
typedef struct { int8_t* codes; float *scales, *sums; bf16* halves; float* floats; int64_t ins; } Activations;

INLINE Activations activations(uint8_t* at, int64_t n, int64_t ins) {
  Activations a;
  a.codes = (int8_t*)at;
  a.scales = (float*)(at + n * ins);
  a.sums = a.scales + n * (ins / GROUP);
  a.halves = (bf16*)at;
  a.floats = (float*)at;
  a.ins = ins;
  return a;
}

INLINE void put_group(const Activations& a, int kind, int64_t row, int64_t column, F x, F y) {
  if (kind == FLOAT32) {
    store(a.floats + row * a.ins + column, x);
    store(a.floats + row * a.ins + column + 16, y);
  } else if (kind == BFLOAT16) {
#if defined(__AVX512BF16__)
    narrow(a.halves + row * a.ins + column, x);
    narrow(a.halves + row * a.ins + column + 16, y);
#else
    store(a.floats + row * a.ins + column, x);
    store(a.floats + row * a.ins + column + 16, y);
#endif
  } else {
    const int64_t group = row * (a.ins / GROUP) + column / GROUP;
    const float most = most_of(larger(magnitude(x), magnitude(y)));
    const float scale = most / 127, inverse = most > 1e-30f ? 127 / most : 0;
    const I low = to_int(mul(x, set1(inverse))), high = to_int(mul(y, set1(inverse)));
    store_bytes(a.codes + row * a.ins + column, low);
    store_bytes(a.codes + row * a.ins + column + 16, high);
    a.scales[group] = scale;
    a.sums[group] = scale * (float)(total_i(low) + total_i(high));
  }
}

// ---- products: ROWS rows of activations times COLS tiles of a weight, to y [ROWS][COLS][16] ---------------------------

static int8_t nf4_levels[16];

// Of a weight in codes: INT4, NF4 or INT8.
template <int ROWS, int COLS, int KIND>
INLINE void tile_of_codes(const Activations& a, int64_t row, const uint8_t* data, int64_t groups, F (*y)[COLS]) {
  constexpr int words = KIND == INT8 ? 8 : 4, size = TILE_BYTES(KIND);  // words of 64 bytes; in 4 bits two codes a byte
  const int64_t apart = groups * size;
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLS; c++) y[r][c] = set1(0);
  const int8_t* codes = a.codes + row * a.ins;
  const float *scales = a.scales + row * groups, *sums = a.sums + row * groups;
  for (int64_t g = 0; g < groups; g++, data += size) {
    I part[ROWS][COLS];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLS; c++) part[r][c] = zero_i();
#pragma GCC unroll 8
    for (int word = 0; word < words; word++) {
      B low[COLS], high[COLS];
      for (int c = 0; c < COLS; c++) {
        const B all = bytes(data + c * apart + word * 64);
        prefetch(data + c * apart + word * 64 + COLS * apart);
        if (KIND == INT8) {
          low[c] = biased(all);
          continue;
        }
        low[c] = low_nibbles(all);
        high[c] = high_nibbles(all);
        if (KIND == NF4) low[c] = look_up(low[c], nf4_levels), high[c] = look_up(high[c], nf4_levels);
      }
      for (int r = 0; r < ROWS; r++) {
        const int8_t* x = codes + r * a.ins + g * GROUP + word * (GROUP / words);
        const B first = same4(x);
        for (int c = 0; c < COLS; c++)
          part[r][c] = KIND == INT4 ? dot(part[r][c], low[c], first) : dot_levels(part[r][c], low[c], first);
        if (KIND == INT8) continue;
        const B second = same4(x + 4);
        for (int c = 0; c < COLS; c++)
          part[r][c] = KIND == INT4 ? dot(part[r][c], high[c], second) : dot_levels(part[r][c], high[c], second);
      }
    }
    for (int c = 0; c < COLS; c++) {
      const uint8_t* at = data + c * apart + words * 64;
      prefetch(at + COLS * apart);
      // int4: (code - 8) · scale + zero. The others: (level or code, less its bias) · scale.
      const F scale = KIND == INT4 ? low_half(at) : load((const float*)at);
      const F offset = KIND == INT4 ? fma16(scale, set1(-8), high_half(at)) : mul(scale, set1(-LEVELS_BIAS));
      for (int r = 0; r < ROWS; r++) {
        y[r][c] = fma16(to_float(part[r][c]), mul(scale, set1(scales[r * groups + g])), y[r][c]);
        y[r][c] = fma16(offset, set1(sums[r * groups + g]), y[r][c]);
      }
    }
  }
}

template <int ROWS, int COLS>
INLINE void tile16(const Activations& a, int64_t row, const uint8_t* data, int64_t ins, F (*y)[COLS]) {
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLS; c++) y[r][c] = set1(0);
  for (int64_t i = 0; i < ins; i += 2, data += 64) {  // two columns of sixteen rows, pair by pair
    for (int c = 0; c < COLS; c++) prefetch(data + c * ins * 32 + 2048);
#if defined(__AVX512BF16__)
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      memcpy(&pair, a.halves + (row + r) * a.ins + i, 4);
      for (int c = 0; c < COLS; c++)
        y[r][c] = _mm512_dpbf16_ps(y[r][c], (__m512bh)_mm512_loadu_si512(data + c * ins * 32),
                                   (__m512bh)_mm512_set1_epi32(pair));
    }
#else
    F even[COLS], odd[COLS];
    for (int c = 0; c < COLS; c++) even[c] = low_half(data + c * ins * 32), odd[c] = high_half(data + c * ins * 32);
    for (int r = 0; r < ROWS; r++) {
      const float* x = a.floats + (row + r) * a.ins + i;
      for (int c = 0; c < COLS; c++) {
        y[r][c] = fma16(even[c], set1(x[0]), y[r][c]);
        y[r][c] = fma16(odd[c], set1(x[1]), y[r][c]);
      }
    }
#endif
  }
}

template <int ROWS, int COLS>
INLINE void tile32(const Activations& a, int64_t row, const uint8_t* data, int64_t ins, F (*y)[COLS]) {
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLS; c++) y[r][c] = set1(0);
  const float* weight = (const float*)data;
  for (int64_t i = 0; i < ins; i++)
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLS; c++)
        y[r][c] = fma16(load(weight + (c * ins + i) * 16), set1(a.floats[(row + r) * a.ins + i]), y[r][c]);
}

template <int ROWS, int COLS>
static void tile(const Weight* w, const Activations& a, int64_t row, int64_t first, float* out, int64_t stride) {
  F y[ROWS][COLS];
  const int64_t groups = w->ins / GROUP;
  switch (w->kind) {
#define CODES(KIND) \
  case KIND: tile_of_codes<ROWS, COLS, KIND>(a, row, w->data + first * groups * TILE_BYTES(KIND), groups, y); break;
    CODES(INT4) CODES(NF4) CODES(INT8)
    case BFLOAT16: tile16<ROWS, COLS>(a, row, w->data + first * w->ins * 32, w->ins, y); break;
    default: tile32<ROWS, COLS>(a, row, w->data + first * w->ins * 64, w->ins, y);
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLS; c++) {
      F value = y[r][c];
      if (w->bias) value = add(value, load(w->bias + (first + c) * 16));
      store(out + r * stride + c * 16, value);
    }
}

#define MOST_ROWS 8  // of a tile: as many as there are registers for

static void tiles(const Weight* w, const Activations& a, int64_t row, int rows, int64_t first, int count, float* out,
                  int64_t stride) {
  int c = 0;
  switch (rows) {
    case 1:
      for (; c + TILES_OF_ONE <= count; c += TILES_OF_ONE) tile<1, TILES_OF_ONE>(w, a, row, first + c, out + c * 16, stride);
      for (; c < count; c++) tile<1, 1>(w, a, row, first + c, out + c * 16, stride);
      break;
#define PAIRS(N)                                                                                  \
  case N:                                                                                         \
    for (; c + 2 <= count; c += 2) tile<N, 2>(w, a, row, first + c, out + c * 16, stride);        \
    for (; c < count; c++) tile<N, 1>(w, a, row, first + c, out + c * 16, stride);                \
    break;
#define SINGLES(N)                                                                                \
  case N:                                                                                         \
    for (; c < count; c++) tile<N, 1>(w, a, row, first + c, out + c * 16, stride);                \
    break;
    PAIRS(2) PAIRS(3) PAIRS(4) PAIRS(5) PAIRS(6) SINGLES(7) SINGLES(8)
  }
}

// ---- the team -----------------------------------------------------------------------------------------------------------

#define MOST_THREADS 64
#define TURNS 64     // of waiting before the processor is left to others
#define PATIENCE 4000 // times it is left before a thread goes to sleep between passes

typedef struct { int64_t generation; int32_t waiting; char apart[52]; } Barrier;

static struct {
  pthread_mutex_t one_pass, asleep;
  pthread_cond_t wake;
  int64_t job;  // number of the pass, and in its lowest byte how many threads it takes
  int32_t members, sleepers;
  const Program* program;
  const Pass* pass;
  char apart[64];
  Barrier barrier;
} team = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 1, 0, 0, 0, {0}, {0, 0, {0}}};

INLINE void be_patient(int* turns) {
  if (++*turns < TURNS) rest();
  else sched_yield();
}

static void meet(int threads) {
  if (threads == 1) return;
  const int64_t generation = __atomic_load_n(&team.barrier.generation, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&team.barrier.waiting, 1, __ATOMIC_ACQ_REL) == threads) {
    __atomic_store_n(&team.barrier.waiting, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team.barrier.generation, generation + 1, __ATOMIC_RELEASE);
    return;
  }
  int turns = 0;
  while (__atomic_load_n(&team.barrier.generation, __ATOMIC_ACQUIRE) == generation) be_patient(&turns);
}

static void run(const Program* program, const Pass* pass, int thread);

static void* member(void* number) {
  const int thread = (int)(intptr_t)number;
  int64_t done = __atomic_load_n(&team.job, __ATOMIC_ACQUIRE);
  __atomic_store_n(&team.members, thread + 1, __ATOMIC_RELEASE);
  for (;;) {
    int turns = 0;
    int64_t job;
    while ((job = __atomic_load_n(&team.job, __ATOMIC_ACQUIRE)) == done) {
      be_patient(&turns);
      if (turns < TURNS + PATIENCE) continue;
      pthread_mutex_lock(&team.asleep);
      __atomic_store_n(&team.sleepers, team.sleepers + 1, __ATOMIC_SEQ_CST);
      while (__atomic_load_n(&team.job, __ATOMIC_SEQ_CST) == done) pthread_cond_wait(&team.wake, &team.asleep);
      __atomic_store_n(&team.sleepers, team.sleepers - 1, __ATOMIC_SEQ_CST);
      pthread_mutex_unlock(&team.asleep);
    }
    done = job;
    if (thread < (job & 255)) run(team.program, team.pass, thread);
  }
  return 0;
}

static void alone_after_fork() {  // threads do not follow into a child
  team.members = 1;
  team.sleepers = team.barrier.waiting = 0;
  pthread_mutex_init(&team.one_pass, 0);
  pthread_mutex_init(&team.asleep, 0);
  pthread_cond_init(&team.wake, 0);
}

// ---- the steps ----------------------------------------------------------------------------------------------------------

INLINE void share(int64_t units, int thread, int threads, int64_t* first, int64_t* last) {
  *first = units * thread / threads;
  *last = units * (thread + 1) / threads;
}

INLINE float factor_of(const float* x, int64_t width, float eps) {  // of x / sqrt(mean(x²) + eps)
  F squares = set1(0);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) squares = fma16(load(x + i), load(x + i), squares);
  float sum = sum_of(squares);
  for (; i < width; i++) sum += x[i] * x[i];
  return 1 / sqrtf(sum / (float)width + eps);
}

static void turn(float* x, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float low = x[i], high = x[half + i];
    x[i] = low * cosines[i] - high * sines[i];
    x[half + i] = high * cosines[i] + low * sines[i];
  }
}

INLINE F activated(F gate, int gelu) {
  const F one = set1(1);
  if (!gelu) return divide(gate, add(one, exponential(sub(set1(0), gate))));
  const F inner = mul(set1(0.7978845608f), fma16(mul(mul(gate, gate), gate), set1(0.044715f), gate));
  return divide(gate, add(one, exponential(mul(set1(-2), inner))));  // x · (1 + tanh y) / 2 = x / (1 + exp(-2y))
}

typedef struct {  // what a thread knows in a pass
  const Program* p;
  const Pass* pass;
  int thread, threads;
} Place;

INLINE float* at_row(const Place& here, int buffer, int64_t row) {
  return here.pass->buffers[buffer] + row * here.p->widths[buffer];
}

// Keys and values of a row in its text's cache: of a layer's keys (half 0) or values (half 1), of one head.
INLINE uint8_t* cached(const Place& here, int slot, int layer, int half, int64_t head, int64_t cell) {
  const Program* p = here.p;
  const int64_t capacity = here.pass->capacities[slot];
  const int64_t index = (((int64_t)layer * 2 + half) * p->key_heads + head) * capacity + cell;
  return (uint8_t*)here.pass->caches[slot] + index * p->padded * (p->wide_cache ? 4 : 2);
}

static void put_in_cache(const Place& here, uint8_t* to, const float* x) {
  for (int64_t i = 0; i < here.p->padded; i += 16) {
    if (here.p->wide_cache) store((float*)to + i, load(x + i));
    else narrow((bf16*)to + i, load(x + i));
  }
}

// A head of a row, normalised if there is a norm for it alone, and turned; keys and values go to the cache.
static void finish_head(const Place& here, const Step* s, int64_t row, int64_t head, float* x, const float* norm,
                        float factor) {
  const Program* p = here.p;
  const Row& r = here.pass->rows[row];
  const Turning& t = here.pass->turnings[s->kind];
  const int64_t half = p->size / 2, of_keys = head - p->heads;
  if (of_keys < p->key_heads) {
    if (norm)
      for (int64_t i = 0; i < p->size; i++) x[i] = x[i] * factor * norm[i];
    turn(x, t.cosines + r.position * half, t.sines + r.position * half, half);
  }
  if (of_keys >= 0)
    put_in_cache(here, cached(here, r.slot, s->layer, of_keys >= p->key_heads, of_keys % p->key_heads, r.cell), x);
}

static void heads(const Place& here, const Step* s, const Activations& a) {
  const Program* p = here.p;
  const int64_t n = here.pass->n, all = p->heads + 2 * p->key_heads, per_head = p->padded / 16;
  const int64_t skipped = s->flags & KEYS ? p->heads : 0;
  int64_t first, last;
  share(all - skipped, here.thread, here.threads, &first, &last);
  for (int64_t head = skipped + first; head < skipped + last; head++) {
    const float* norm = s->flags & WIDE || head >= p->heads + p->key_heads ? 0 : head < p->heads ? s->norm : s->other_norm;
    for (int64_t row = 0; row < n; row += MOST_ROWS) {
      const int rows = n - row < MOST_ROWS ? n - row : MOST_ROWS;
      float* to = at_row(here, s->to, row) + head * p->padded;
      tiles(s->weight, a, row, rows, head * per_head, per_head, to, p->widths[s->to]);
      if (s->flags & WIDE) continue;
      for (int r = 0; r < rows; r++, to += p->widths[s->to])
        finish_head(here, s, row + r, head, to, norm, norm ? factor_of(to, p->size, s->eps) : 0);
    }
  }
}

static void turn_wide(const Place& here, const Step* s) {  // norms as wide as all heads of a kind
  const Program* p = here.p;
  int64_t first, last;
  share(p->heads + 2 * p->key_heads, here.thread, here.threads, &first, &last);
  for (int64_t row = 0; row < here.pass->n; row++) {
    float* x = at_row(here, s->to, row);
    const float* other = at_row(here, s->from, row);  // the unturned: others write `to` meanwhile
    float factors[2];
    for (int keys = 0; keys < 2; keys++) {
      const int64_t from = keys ? p->heads : 0, count = keys ? p->key_heads : p->heads;
      float sum = 0;
      for (int64_t h = from; h < from + count; h++)
        for (int64_t i = 0; i < p->size; i++) sum += other[h * p->padded + i] * other[h * p->padded + i];
      factors[keys] = 1 / sqrtf(sum / (float)(count * p->size) + s->eps);
    }
    for (int64_t head = first; head < last; head++) {
      const int keys = head >= p->heads;
      const float* norm = keys ? s->other_norm + (head - p->heads) * p->size : s->norm + head * p->size;
      for (int64_t i = 0; i < p->padded; i++) x[head * p->padded + i] = other[head * p->padded + i];
      finish_head(here, s, row, head, x + head * p->padded, norm, factors[keys]);
    }
  }
}

// The sums over each of sixteen vectors, side by side; what one comes to does not depend on the others.
#if defined(__AVX512VNNI__)
INLINE F sums_of(const F* of) {
  F pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; i++)
    pairs[i] = add(_mm512_unpacklo_ps(of[2 * i], of[2 * i + 1]), _mm512_unpackhi_ps(of[2 * i], of[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d left = _mm512_castps_pd(pairs[2 * i]), right = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)), _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  }
  for (int i = 0; i < 2; i++)
    eights[i] = add(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                    _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return add(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}
#elif defined(__AVX2__)
INLINE __m256 sums_of8(const F* of) {
  __m256 four[2];
  for (int i = 0; i < 2; i++) {
    const F* v = of + 4 * i;
    const __m256 low = _mm256_hadd_ps(_mm256_add_ps(v[0].a, v[0].b), _mm256_add_ps(v[1].a, v[1].b));
    const __m256 high = _mm256_hadd_ps(_mm256_add_ps(v[2].a, v[2].b), _mm256_add_ps(v[3].a, v[3].b));
    four[i] = _mm256_hadd_ps(low, high);
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}
INLINE F sums_of(const F* of) { return {sums_of8(of), sums_of8(of + 8)}; }
#else
INLINE F sums_of(const F* of) {
  float found[16];
  for (int k = 0; k < 16; k++)
    found[k] = vaddvq_f32(vaddq_f32(vaddq_f32(of[k].v[0], of[k].v[2]), vaddq_f32(of[k].v[1], of[k].v[3])));
  return load(found);
}
#endif

INLINE F number(const bf16* p) { return widen(p); }
INLINE F number(const float* p) { return load(p); }

typedef struct {  // a query and what it sees: the tokens from `begin` to `end` of its text; their cells
  const float* x;
  float* out;
  int64_t begin, end, shared;
  const int32_t* own;
} Query;

INLINE int64_t cell_of(const Query& q, int64_t j) { return j < q.shared ? j : q.own[j - q.shared]; }

// Scores of a query, from token `base` (a multiple of 16) on, as shares of their sum; returns the sum.
template <class Number>
static float shares(const Query& q, const Number* keys, int64_t size, float scale, int64_t base, float* to) {
  F most = set1(-INFINITY);
  for (int64_t j = base; j < q.end; j += 16) {
    F products[16];
    for (int k = 0; k < 16; k++) {
      const int64_t token = j + k < q.end ? j + k : q.end - 1;
      const Number* key = keys + cell_of(q, token) * size;
      products[k] = mul(load(q.x), number(key));
      for (int64_t i = 16; i < size; i += 16) products[k] = fma16(load(q.x + i), number(key + i), products[k]);
    }
    const int from = j < q.begin ? (q.begin - j < 16 ? (int)(q.begin - j) : 16) : 0;
    const int end = q.end - j < 16 ? (int)(q.end - j) : 16;
    const F score = lanes(from, end, mul(set1(scale), sums_of(products)), set1(-INFINITY));
    most = larger(most, score);
    store(to + j - base, score);
  }
  const F highest = set1(most_of(most));
  F sum = set1(0);
  for (int64_t j = base; j < q.end; j += 16) {
    const int from = j < q.begin ? (q.begin - j < 16 ? (int)(q.begin - j) : 16) : 0;
    const int end = q.end - j < 16 ? (int)(q.end - j) : 16;
    const F each = lanes(from, end, exponential(sub(load(to + j - base), highest)), set1(0));
    store(to + j - base, each);
    sum = add(sum, each);
  }
  return sum_of(sum);
}

// Values times shares for COUNT queries of the same keys, COLUMNS times sixteen columns at a time.
template <class Number, int COUNT, int COLUMNS>
static void weigh(const Query* q, const float* const* share, const float* sums, const Number* values, int64_t size,
                  int64_t column, int64_t base) {
  F total[COUNT][COLUMNS];
  for (int k = 0; k < COUNT; k++)
    for (int c = 0; c < COLUMNS; c++) total[k][c] = set1(0);
  int64_t together = q[0].shared < q[0].end ? q[0].shared : q[0].end, first = q[0].begin;
  for (int k = 1; k < COUNT; k++) {
    const int64_t here = q[k].shared < q[k].end ? q[k].shared : q[k].end;
    together = here < together ? here : together;
    first = q[k].begin < first ? q[k].begin : first;
  }
  for (int64_t j = first; j < together; j++) {
    F value[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) value[c] = number(values + j * size + column + c * 16);
    prefetch(values + (j + 8) * size + column);
    for (int k = 0; k < COUNT; k++)
      for (int c = 0; c < COLUMNS; c++) total[k][c] = fma16(set1(share[k][j - base]), value[c], total[k][c]);
  }
  for (int k = 0; k < COUNT; k++) {
    for (int64_t j = together > first ? together : first; j < q[k].end; j++) {
      const Number* from = values + cell_of(q[k], j) * size + column;
      for (int c = 0; c < COLUMNS; c++) total[k][c] = fma16(set1(share[k][j - base]), number(from + c * 16), total[k][c]);
    }
    for (int c = 0; c < COLUMNS; c++) store(q[k].out + column + c * 16, divide(total[k][c], set1(sums[k])));
  }
}

#define MOST_QUERIES 6

template <class Number>
static void attend_together(const Query* q, int count, const Number* keys, const Number* values, int64_t size, float scale,
                            float* scratch, int64_t apart, int64_t base) {
  const float* share[MOST_QUERIES];
  float sums[MOST_QUERIES];
  for (int k = 0; k < count; k++) {
    share[k] = scratch + k * apart;
    sums[k] = shares(q[k], keys, size, scale, base, scratch + k * apart);
  }
  int64_t column = 0;
#define WEIGH(N)                                                                                                         \
  case N:                                                                                                                \
    for (; column + 64 <= size; column += 64) weigh<Number, N, 4>(q, share, sums, values, size, column, base);           \
    for (; column < size; column += 16) weigh<Number, N, 1>(q, share, sums, values, size, column, base);                 \
    break;
  switch (count) { WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) WEIGH(5) WEIGH(6) }
}

// Queries go in bundles of as many as divide best among the threads: consecutive rows of a text, heads of one key head.
static void attend(const Place& here, const Step* s, float** scratch, int64_t* scratch_size) {
  const Program* p = here.p;
  const Pass* pass = here.pass;
  const int64_t group = p->heads / p->key_heads, n = pass->n;
  int64_t best = 0, bundle = 1;
  for (int64_t size = 1; size <= MOST_QUERIES; size++) {
    const int64_t units = (n * group + size - 1) / size * p->key_heads;
    const int64_t most = (units + here.threads - 1) / here.threads * (2 * size + 1);  // reading keys is half a query
    if (!best || most <= best) best = most, bundle = size;
  }
  const int64_t per_head = (n * group + bundle - 1) / bundle;
  int64_t first, last;
  share(per_head * p->key_heads, here.thread, here.threads, &first, &last);
  const Turning& t = pass->turnings[s->kind];
  for (int64_t unit = first; unit < last; unit++) {
    const int64_t key_head = unit / per_head;
    int64_t next = unit % per_head * bundle;
    const int64_t end = next + bundle < n * group ? next + bundle : n * group;
    while (next < end) {
      Query q[MOST_QUERIES];
      int count = 0;
      const int slot = pass->rows[next / group].slot;
      int64_t longest = 0, base = INT64_MAX;
      for (; next < end && pass->rows[next / group].slot == slot; next++, count++) {
        const int64_t row = next / group, head = key_head * group + next % group;
        const Row& r = pass->rows[row];
        q[count].x = at_row(here, s->from, row) + head * p->padded;
        q[count].out = at_row(here, s->to, row) + head * p->padded;
        const int64_t seen = s->flags & AHEAD ? r.shared + r.own_count : r.position + 1;
        const int64_t back = s->flags & BLOCK ? r.shared : seen;
        q[count].end = seen;
        q[count].begin = t.window && back > t.window ? back - t.window : 0;
        q[count].shared = r.shared;
        q[count].own = pass->cells + r.own;
        longest = q[count].end > longest ? q[count].end : longest;
        base = q[count].begin < base ? q[count].begin : base;
      }
      base &= ~(int64_t)15;
      const int64_t apart = (longest - base + 31) & ~(int64_t)15;
      if (apart * MOST_QUERIES > *scratch_size) {
        free(*scratch);
        *scratch_size = 2 * apart * MOST_QUERIES;
        *scratch = (float*)malloc(*scratch_size * sizeof(float));
      }
      const uint8_t* keys = cached(here, slot, s->layer, 0, key_head, 0);
      const uint8_t* values = cached(here, slot, s->layer, 1, key_head, 0);
      if (p->wide_cache)
        attend_together(q, count, (const float*)keys, (const float*)values, p->padded, s->factor, *scratch, apart, base);
      else
        attend_together(q, count, (const bf16*)keys, (const bf16*)values, p->padded, s->factor, *scratch, apart, base);
    }
  }
}

// Rows first … last-1 of a buffer, normalised, as activations for a weight of `kind` and `ins` columns; `skip`: rows of
// the buffer before those of the activations.
static void enter(const Place& here, const Step* s, const Activations& a, int kind, int64_t first, int64_t last, int64_t skip) {
  for (int64_t row = first; row < last; row++) {
    const float* x = at_row(here, s->from, skip + row);
    const float factor = s->norm ? factor_of(x, s->width, s->eps) : 0;
    const int64_t width = (s->width + GROUP - 1) & ~(int64_t)(GROUP - 1);
    for (int64_t i = 0; i < width; i += GROUP) {
      F low = load(x + i), high = load(x + i + 16);
      if (s->norm) {
        low = mul(mul(low, set1(factor)), load(s->norm + i));
        high = mul(mul(high, set1(factor)), load(s->norm + i + 16));
      }
      put_group(a, kind, row, s->at + i, low, high);
    }
  }
}

static void product(const Place& here, const Step* s, const Activations& a, int64_t n, float* to, int64_t stride) {
  const Weight* w = s->weight;
  int64_t first, last;
  share((w->tiles + 1) / 2, here.thread, here.threads, &first, &last);
  first *= 2;
  last = last * 2 < w->tiles ? last * 2 : w->tiles;
  const int width = 4;
  float y[MOST_ROWS * 64];
  for (int64_t t = first; t < last; t += width) {
    const int count = last - t < width ? (int)(last - t) : width;
    for (int64_t row = 0; row < n; row += MOST_ROWS) {
      const int rows = n - row < MOST_ROWS ? (int)(n - row) : MOST_ROWS;
      float* at = to + row * stride + t * 16;
      if (!(s->flags & ADDED)) {
        tiles(w, a, row, rows, t, count, at, stride);
        continue;
      }
      tiles(w, a, row, rows, t, count, y, 64);
      for (int r = 0; r < rows; r++)
        for (int c = 0; c < count * 16; c += 16)
          store(at + r * stride + c, add(load(at + r * stride + c), load(y + r * 64 + c)));
    }
  }
}

#define STRETCH 1024  // logits that one thread looks over at a time
#define MOST_STRETCHES 512
#define MOST_TOLD 64  // rows whose likeliest token is told

static struct {
  float most, sum;  // of exp(logit - most)
  int odd;          // whether one is no number
} stretches[MOST_TOLD][MOST_STRETCHES];

static void look_over(const Place& here, int64_t rows, int64_t stride) {
  const Pass* pass = here.pass;
  int64_t first, last;
  share((pass->columns + STRETCH - 1) / STRETCH, here.thread, here.threads, &first, &last);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t s = first; s < last; s++) {
      const float* x = pass->logits + row * stride + s * STRETCH;
      const int64_t left = pass->columns - s * STRETCH, count = left < STRETCH ? left : STRETCH;
      F most = set1(-INFINITY), nothing = set1(0), sum = set1(0);
      for (int64_t j = 0; j < count; j += 16) {
        const F y = load(x + j);
        most = larger(most, lanes(0, count - j < 16 ? (int)(count - j) : 16, y, set1(-INFINITY)));
        nothing = fma16(y, set1(0), nothing);
      }
      const float highest = most_of(most), none = sum_of(nothing);
      for (int64_t j = 0; j < count && pass->shares; j += 16) {
        const F y = exponential(sub(load(x + j), set1(highest)));
        sum = add(sum, lanes(0, count - j < 16 ? (int)(count - j) : 16, y, set1(0)));
      }
      stretches[row][s].most = highest;
      stretches[row][s].sum = pass->shares ? sum_of(sum) : 0;
      stretches[row][s].odd = none != none;
    }
}

static void tell_likeliest(const Pass* pass, int64_t stride) {
  const int64_t count = (pass->columns + STRETCH - 1) / STRETCH;
  for (int64_t row = 0; row < pass->wanted; row++) {
    const float* x = pass->logits + row * stride;
    int64_t best = 0, odd = 0;
    for (int64_t s = 0; s < count; s++) {
      odd |= stretches[row][s].odd;
      if (stretches[row][s].most > stretches[row][best].most) best = s;
    }
    int64_t at = odd ? 0 : best * STRETCH;
    if (!odd)
      while (x[at] != stretches[row][best].most) at++;
    else  // what is no number comes before all
      for (int64_t i = 1; i < pass->columns && x[at] == x[at]; i++)
        if (x[i] != x[i] || x[i] > x[at]) at = i;
    float sum = 0;
    for (int64_t s = 0; s < count && pass->shares; s++) sum += stretches[row][s].sum * expf(stretches[row][s].most - x[at]);
    pass->likeliest[row] = at;
    pass->told[row] = x[at];
    pass->told[pass->wanted + row] = pass->shares ? 1 / sum : 0;
  }
}

static void gated(const Place& here, const Step* s, const Activations& a, const Activations& to) {
  int64_t first, last;
  share(s->weight->tiles / 4, here.thread, here.threads, &first, &last);
  const int64_t n = here.pass->n;
  float y[MOST_ROWS * 64];
  for (int64_t unit = first; unit < last; unit++)
    for (int64_t row = 0; row < n; row += MOST_ROWS) {
      const int rows = n - row < MOST_ROWS ? (int)(n - row) : MOST_ROWS;
      tiles(s->weight, a, row, rows, unit * 4, 4, y, 64);
      for (int r = 0; r < rows; r++) {
        F inner[2];
        for (int c = 0; c < 2; c++) {
          inner[c] = mul(activated(load(y + r * 64 + c * 16), s->flags & GELU), load(y + r * 64 + 32 + c * 16));
        }
        put_group(to, s->kind, row + r, unit * GROUP, inner[0], inner[1]);
      }
    }
}

static void embed(const Place& here, const Step* s, int64_t first, int64_t last) {
  const int64_t whole = here.p->widths[s->to];
  for (int64_t row = first; row < last; row++) {
    float* to = at_row(here, s->to, row);
    const int64_t at = here.pass->ids[row] * s->width;
    for (int64_t i = 0; i < s->width; i++) {
      float x;
      if (s->flags & WIDE) {
        x = ((const float*)s->table)[at + i];
      } else {
        const uint32_t bits = (uint32_t)((const bf16*)s->table)[at + i] << 16;
        memcpy(&x, &bits, 4);
      }
      to[i] = x * s->factor;
    }
    for (int64_t i = s->width; i < whole; i++) to[i] = 0;
  }
}

static void norm_rows(const Place& here, const Step* s, int64_t first, int64_t last) {
  const int64_t whole = here.p->widths[s->to];
  for (int64_t row = first; row < last; row++) {
    const float* x = at_row(here, s->from, row);
    float* to = at_row(here, s->to, row);
    const float factor = s->norm ? factor_of(x, s->width, s->eps) : 1;
    for (int64_t i = 0; i < whole; i += 16) {
      F y = load(x + i);
      if (s->norm) y = mul(mul(y, set1(factor)), load(s->norm + i));
      store(to + i, s->flags & ADDED ? add(load(to + i), y) : y);
    }
  }
}

#define ALONE 4  // rows up to which every thread makes the activations for itself, which spares a meeting

static void run(const Program* p, const Pass* pass, int thread) {
  static __thread float* scratch = 0;
  static __thread int64_t scratch_size = 0;
  const int threads = pass->threads;
  const Place here = {p, pass, thread, threads};
  const int64_t n = pass->n;
  int64_t first, last;
  share(n, thread, threads, &first, &last);
  for (int i = pass->first; i < pass->last; i++) {
    const Step* s = p->step + i;
    const Weight* w = s->weight;
    const int64_t rows = s->op == LOGITS ? pass->wanted : n;
    const int own = rows <= ALONE && !(s->flags & FOR_ALL) ? 2 + 2 * thread : 0;
    const int slot = own + (s->op == ENTER ? s->to : s->from);
    const Activations a = w && s->op != LOGITS ? activations(pass->activations[slot], rows, w->ins) : Activations();
    switch (s->op) {
      case EMBED: embed(here, s, first, last); break;
      case NORM: norm_rows(here, s, first, last); break;
      case HEADS: heads(here, s, a); break;
      case TURN: turn_wide(here, s); break;
      case ATTEND: attend(here, s, &scratch, &scratch_size); break;
      case PRODUCT: product(here, s, a, n, pass->buffers[s->to], p->widths[s->to]); break;
      case GATED: gated(here, s, a, activations(pass->activations[s->to], n, s->width)); break;
      case COPY:
        for (int64_t row = first; row < last; row++)
          memcpy(pass->output + row * pass->stride + s->at, at_row(here, s->from, row), s->width * sizeof(float));
        continue;  // what was copied is not written before the next meeting
      case ENTER:
        enter(here, s, a, w->kind, own ? 0 : first, own ? n : last, 0);
        if (own) continue;
        break;
      case LOGITS: {
        if (!rows) continue;
        const Activations last_rows = activations(pass->activations[own], rows, w->ins);
        int64_t from = 0, to = rows;
        if (!own) share(rows, thread, threads, &from, &to);
        enter(here, s, last_rows, w->kind, from, to, n - rows);
        if (!own) meet(threads);
        product(here, s, last_rows, rows, pass->logits, w->tiles * 16);
        if (!pass->likeliest) continue;
        meet(threads);
        look_over(here, rows, w->tiles * 16);
        continue;
      }
    }
    meet(threads);
  }
  meet(threads);
}

// ---- what Python calls ---------------------------------------------------------------------------------------------------

extern "C" {

// Runs the steps first … last-1 of a program over the rows of a pass. One pass at a time; returns once it is done.
void native_pass(const Program* program, Pass* pass) {
  static int forks = 0;
  pthread_mutex_lock(&team.one_pass);
  if (!forks) forks = 1, pthread_atfork(0, 0, alone_after_fork);
  if (pass->threads > MOST_THREADS) pass->threads = MOST_THREADS;
  while (team.members < pass->threads) {
    const int before = team.members;
    pthread_t thread;
    if (pthread_create(&thread, 0, member, (void*)(intptr_t)before)) break;
    pthread_detach(thread);
    while (__atomic_load_n(&team.members, __ATOMIC_ACQUIRE) == before) sched_yield();
  }
  if (pass->threads > team.members) pass->threads = team.members;
  if (pass->threads < 1) pass->threads = 1;
  if (pass->threads > 1) {
    team.program = program;
    team.pass = pass;
    __atomic_store_n(&team.job, ((team.job >> 8) + 1) << 8 | pass->threads, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.sleepers, __ATOMIC_SEQ_CST)) {
      pthread_mutex_lock(&team.asleep);
      pthread_cond_broadcast(&team.wake);
      pthread_mutex_unlock(&team.asleep);
    }
  }
  run(program, pass, 0);
  if (pass->likeliest) tell_likeliest(pass, program->step[pass->last - 1].weight->tiles * 16);
  pthread_mutex_unlock(&team.one_pass);
}

// The sixteen values that codes of NF4 stand for, in -1 … 1: to be set before the first pass.
void native_levels(const float* values) {
  for (int i = 0; i < 16; i++) nf4_levels[i] = (int8_t)(uint8_t)((int)lrintf(values[i] * 127) + LEVELS_BIAS);
}

// A number that changes with the structures above, to be compared with Python's.
int64_t native_layout(void) {
  return sizeof(Weight) + 1000 * sizeof(Step) + 1000000 * sizeof(Program) + 1000000000LL * sizeof(Row) +
         1000000000000LL * sizeof(Pass);
}
}
