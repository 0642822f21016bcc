// What the fused forward does on a processor with AVX512-BF16 between and in its products over a few rows: the functions
// of layers.py that bear the same names, each in one operation instead of five to fifteen. Sums are in float32; what a
// row comes to, to the last bit, does not depend on the rows beside it.
#include <immintrin.h>
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace {

struct View {  // a tensor handed over by PyTorch: contiguous, except that rows of a mask may lie further apart
  AtenTensorHandle handle;
  explicit View(StableIValue value) { std::memcpy(&handle, &value, sizeof handle); }
  ~View() { aoti_torch_delete_tensor_object(handle); }
  template <class T>
  T* data() const {
    void* found = nullptr;
    aoti_torch_get_data_ptr(handle, &found);
    return static_cast<T*>(found);
  }
  int64_t size(int64_t dim) const {
    int64_t found = 0;
    aoti_torch_get_size(handle, dim, &found);
    return found;
  }
  int64_t stride(int64_t dim) const {
    int64_t found = 0;
    aoti_torch_get_stride(handle, dim, &found);
    return found;
  }
};

template <class T>
T number(StableIValue value) {
  T found;
  std::memcpy(&found, &value, sizeof found);
  return found;
}

using bf16 = uint16_t;

__m512 widen(__m256i sixteen) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(sixteen), 16));
}

__m512 load(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

void store(bf16* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

__m512 exponential(__m512 x) {  // the polynomial of Cephes' expf; 0 below 2e-35, before products become denormal
  const __m512 least = _mm512_set1_ps(-80);
  const __mmask16 there = _mm512_cmp_ps_mask(x, least, _CMP_GE_OQ);
  x = _mm512_min_ps(_mm512_max_ps(x, least), _mm512_set1_ps(88));
  const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  x = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), x);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.f, 1.f})
    sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(next));
  return _mm512_maskz_scalef_ps(there, sum, power);
}

// Rows float32 [ROWS, 32 * groups] times COLS times sixteen rows of a weight, into y. A word holds the codes of eight
// neighbours; the lowest becomes a float by a look-up, and the next moves into its place. A group's products are summed
// before they are scaled, and its zero is multiplied with the sum of its activations.
template <int ROWS, int COLS>
void tile(const float* x, const float* sums, const uint8_t* codes, const bf16* scales, int64_t groups, float* y,
          int64_t width) {
  const __m512 less_eight = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  __m512 total[ROWS][COLS];
  for (auto& row : total)
    for (auto& each : row) each = _mm512_setzero_ps();
  for (int64_t group = 0; group < groups; group++) {
    __m512 part[ROWS][COLS];
    for (auto& row : part)
      for (auto& each : row) each = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
      __m512i words[COLS];
      for (int c = 0; c < COLS; c++) {
        const uint8_t* from = codes + ((c * groups + group) * 4 + step) * 64;
        words[c] = _mm512_loadu_si512(from);
        _mm_prefetch(from + COLS * groups * 256, _MM_HINT_T1);  // the same of the next rows
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        __m512 weight[COLS];
        for (int c = 0; c < COLS; c++) {
          weight[c] = _mm512_permutexvar_ps(words[c], less_eight);
          words[c] = _mm512_srli_epi32(words[c], 4);
        }
        for (int r = 0; r < ROWS; r++) {
          const __m512 each = _mm512_set1_ps(x[(r * groups + group) * 32 + step * 8 + i]);
          for (int c = 0; c < COLS; c++) part[r][c] = _mm512_fmadd_ps(weight[c], each, part[r][c]);
        }
      }
    }
    for (int c = 0; c < COLS; c++) {
      const __m512i both = _mm512_loadu_si512(scales + (c * groups + group) * 32);
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
      for (int r = 0; r < ROWS; r++) {
        total[r][c] = _mm512_fmadd_ps(part[r][c], scale, total[r][c]);
        total[r][c] = _mm512_fmadd_ps(zero, _mm512_set1_ps(sums[r * groups + group]), total[r][c]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLS; c++) _mm512_storeu_ps(y + r * width + c * 16, total[r][c]);
}

template <int COLS>
void tiles(const float* x, const float* sums, const uint8_t* codes, const bf16* scales, int64_t groups, float* y,
           int64_t width, int64_t n) {
  constexpr decltype(&tile<1, COLS>) of[] = {tile<1, COLS>, tile<2, COLS>, tile<3, COLS>,
                                             tile<4, COLS>, tile<5, COLS>, tile<6, COLS>};
  const int64_t turns = (n + 5) / 6;  // of nearly as many rows each: as many as there are registers for
  for (int64_t turn = 0; turn < turns; turn++) {
    const int64_t done = turn * n / turns, rows = (turn + 1) * n / turns - done;
    of[rows - 1](x + done * groups * 32, sums + done * groups, codes, scales, groups, y + done * width, width);
  }
}

// multiply_into: x bf16 [n, columns], codes uint8 and scales bf16 as `in_words` packs them, out float32 [n, width]
void multiply_into(StableIValue* stack, uint64_t, uint64_t) {
  const View x(stack[0]), codes(stack[1]), scales(stack[2]), out(stack[3]);
  const int64_t n = x.size(0), groups = x.size(1) / 32, width = out.size(1), blocks = width / 32;
  const auto* from = x.data<const bf16>();
  std::vector<float> in(n * groups * 32), sums(n * groups);
  for (int64_t i = 0; i < n * groups; i++) {
    const __m512 low = load(from + 32 * i), high = load(from + 32 * i + 16);
    _mm512_storeu_ps(&in[32 * i], low);
    _mm512_storeu_ps(&in[32 * i + 16], high);
    sums[i] = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
  }
  const auto* code = codes.data<const uint8_t>();
  const auto* scale = scales.data<const bf16>();
  auto* y = out.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < blocks; i++)
    tiles<2>(in.data(), sums.data(), code + i * groups * 512, scale + i * groups * 64, groups, y + i * 32, width, n);
  if (width % 32)
    tiles<1>(in.data(), sums.data(), code + blocks * groups * 512, scale + blocks * groups * 64, groups, y + blocks * 32,
             width, n);
}

// normalise: x float32 [n, width], weight [width], floor [1], out bf16 [n, width]
void normalise(StableIValue* stack, uint64_t, uint64_t) {
  const View x(stack[0]), weight(stack[1]), floor(stack[2]), out(stack[3]);
  const int64_t n = x.size(0), width = x.size(1);
  const auto* from = x.data<const float>();
  const auto* times = weight.data<const float>();
  const float least = *floor.data<const float>();
  auto* to = out.data<bf16>();
  for (int64_t r = 0; r < n; r++, from += width, to += width) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 each = _mm512_loadu_ps(from + i);
      squares = _mm512_fmadd_ps(each, each, squares);
    }
    const __m512 factor = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) + least * least));
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 each = _mm512_mul_ps(_mm512_loadu_ps(from + i), factor);
      store(to + i, _mm512_mul_ps(each, _mm512_loadu_ps(times + i)));
    }
  }
}

// silu_times: float32 [n, 2 * width], silu of the first half times the second, out bf16 [n, width]
void silu_times(StableIValue* stack, uint64_t, uint64_t) {
  const View both(stack[0]), out(stack[1]);
  const int64_t n = out.size(0), width = out.size(1);
  const auto* from = both.data<const float>();
  auto* to = out.data<bf16>();
  const __m512 one = _mm512_set1_ps(1);
  for (int64_t r = 0; r < n; r++, from += 2 * width, to += width)
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 gate = _mm512_loadu_ps(from + i);
      const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
      store(to + i, _mm512_mul_ps(_mm512_div_ps(gate, below), _mm512_loadu_ps(from + width + i)));
    }
}

// The sums over each of sixteen vectors, side by side: neighbours are folded into each other, four times.
__m512 sums_of(const __m512 (&of)[16]) {
  __m512 pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; i++)
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(of[2 * i], of[2 * i + 1]), _mm512_unpackhi_ps(of[2 * i], of[2 * i + 1]));
  for (int i = 0; i < 4; i++) {
    const __m512d left = _mm512_castps_pd(pairs[2 * i]), right = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  }
  for (int i = 0; i < 2; i++)
    eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                       _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

// COUNT times sixteen columns of the sum of values [n, size], each times its share
template <int COUNT>
void add_up(const float* shares, const bf16* values, int64_t n, int64_t size, float divisor, bf16* out) {
  __m512 sums[COUNT];
  for (auto& each : sums) each = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; j++)
    for (int c = 0; c < COUNT; c++)
      sums[c] = _mm512_fmadd_ps(_mm512_set1_ps(shares[j]), load(values + j * size + c * 16), sums[c]);
  for (int c = 0; c < COUNT; c++) store(out + c * 16, _mm512_div_ps(sums[c], _mm512_set1_ps(divisor)));
}

// attend: rows float32 [n, heads + 2 * key heads, size] of queries, keys and values: turns the first two by cos and
// sin [n, 1, size], puts keys and values into cache bf16 [2, key heads, capacity, size] from position `start` on, and
// attends to what is there from `begin` on, under an additive mask bf16 [n or more, end - begin] unless it is empty;
// out bf16 [n, heads * size]
void attend(StableIValue* stack, uint64_t, uint64_t) {
  const View rows(stack[0]), cosines(stack[1]), sines(stack[2]), cache(stack[3]), mask(stack[4]), out(stack[8]);
  const auto begin = number<int64_t>(stack[5]), start = number<int64_t>(stack[6]);
  const auto scale = static_cast<float>(number<double>(stack[7]));
  const int64_t n = rows.size(0), all = rows.size(1), size = rows.size(2), half = size / 2;
  const int64_t key_heads = cache.size(1), capacity = cache.size(2), heads = all - 2 * key_heads;
  const int64_t seen = start + n - begin, apart = mask.size(0) ? mask.stride(0) : 0;
  auto* row = rows.data<float>();
  auto* held = cache.data<bf16>();
  for (int64_t r = 0; r < n; r++) {
    const float* cos = cosines.data<const float>() + r * size;
    const float* sin = sines.data<const float>() + r * size;
    for (int64_t h = 0; h < heads + key_heads; h++) {
      float* __restrict low = row + (r * all + h) * size;
      float* __restrict high = low + half;
      for (int64_t i = 0; i < half; i++) {
        const float a = low[i], b = high[i];
        low[i] = a * cos[i] + b * sin[half + i];
        high[i] = b * cos[half + i] + a * sin[i];
      }
    }
    for (int64_t h = 0; h < 2 * key_heads; h++)
      for (int64_t i = 0; i < size; i += 16)
        store(held + (h * capacity + start + r) * size + i, _mm512_loadu_ps(row + (r * all + heads + h) * size + i));
  }
  const auto* added = mask.data<const bf16>();
  auto* to = out.data<bf16>();
#pragma omp parallel for schedule(static)
  for (int64_t unit = 0; unit < n * heads; unit++) {
    static thread_local std::vector<float> scores;
    scores.resize((seen + 15) / 16 * 16);
    const int64_t r = unit / heads, h = unit % heads;
    const float* query = row + (r * all + h) * size;
    const bf16* keys = held + (h * key_heads / heads * capacity + begin) * size;
    const bf16* values = keys + key_heads * capacity * size;
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < seen; j += 16) {
      __m512 products[16];
      for (int64_t k = 0; k < 16; k++) {
        const bf16* key = keys + (j + k < seen ? j + k : seen - 1) * size;
        products[k] = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 16)
          products[k] = _mm512_fmadd_ps(_mm512_loadu_ps(query + i), load(key + i), products[k]);
      }
      const __mmask16 there = seen - j < 16 ? (1 << (seen - j)) - 1 : 0xffff;
      __m512 score = _mm512_mul_ps(_mm512_set1_ps(scale), sums_of(products));
      if (apart) {
        const __m256i more = _mm256_maskz_loadu_epi16(there, added + r * apart + j);
        score = _mm512_add_ps(score, widen(more));
      }
      score = _mm512_mask_blend_ps(there, _mm512_set1_ps(-INFINITY), score);
      most = _mm512_max_ps(most, score);
      _mm512_storeu_ps(&scores[j], score);
    }
    const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < seen; j += 16) {
      const __m512 share = exponential(_mm512_sub_ps(_mm512_loadu_ps(&scores[j]), highest));
      _mm512_storeu_ps(&scores[j], share);
      sum = _mm512_add_ps(sum, share);
    }
    const float divisor = _mm512_reduce_add_ps(sum);
    int64_t i = 0;
    for (; i + 64 <= size; i += 64) add_up<4>(scores.data(), values + i, seen, size, divisor, to + unit * size + i);
    for (; i < size; i += 16) add_up<1>(scores.data(), values + i, seen, size, divisor, to + unit * size + i);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(playground, CPU, library) {
  library.impl("multiply_into", &multiply_into);
  library.impl("normalise", &normalise);
  library.impl("silu_times", &silu_times);
  library.impl("attend", &attend);
}
