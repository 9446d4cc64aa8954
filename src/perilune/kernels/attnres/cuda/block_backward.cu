// Gradients of the sources of a block of sublayers, as block_backward of triton_blocks.py, for up to 8 sources:
//
//   ds = p (g . v + base),   dv = prior + sum over queries of p g - (ds s) r^2 / WIDTH v,   C = ds r
//
// Both products run on the tensor cores, one token at a time, with operands as they come from memory. Lane 4 g + t of a
// warp holds eight neighbouring columns (16 bytes) of row g: of source g, and of gradient g. That is an operand of
// gradients . sources (8 x 8, over the columns, whose order does not matter if it is the same in both). Transposed inside
// the warp, the gradients are the operand of weights . gradients, whose result lies where the sources do: 16 bytes of
// row g again, ready to be stored.
//
// The first gradient passes the RMSNorm of the first mix, and comes out in more bits than the others: rows 0 and 1 are
// its two parts of 8 bits, row q + 1 that of query q. Weights come in two such parts along the sum.
//
// A CTA of WIDTH / 256 warps walks over tokens, warp w holds columns 256 w ... of all rows. WIDTH and QUERIES (up to 7)
// are defined before.

#define WARPS (WIDTH / 256)
#define THREADS (32 * WARPS)
#define CHUNKS 8  // of 32 columns in those of a warp

typedef unsigned short u16;  // bfloat16 in memory
__device__ __forceinline__ float low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ void unpack(float (&x)[8], const uint4 &v) {
  x[0] = low(v.x), x[1] = high(v.x), x[2] = low(v.y), x[3] = high(v.y);
  x[4] = low(v.z), x[5] = high(v.z), x[6] = low(v.w), x[7] = high(v.w);
}
__device__ __forceinline__ uint4 packed(const float (&x)[8]) {
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
// Stores the upper 8 bits of eight numbers and leaves the rest.
__device__ __forceinline__ void store_part(u16 *to, float (&x)[8]) {
  uint4 part = packed(x);
  float stored[8];
  unpack(stored, part);
#pragma unroll
  for (int k = 0; k < 8; k++) x[k] -= stored[k];
  *(uint4 *)to = part;
}
__device__ __forceinline__ uint4 load16(const void *p) { return *(const uint4 *)p; }
__device__ __forceinline__ void prefetch(const void *p) {
#ifdef __CUDACC__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// The numbers of a token, in shared memory: weights and scores [query, source], inverse RMS, bases, inverse RMS of the
// first mix.
#define SCORES (QUERIES * 8)
#define INVERSE_RMS (QUERIES * 16)
#define BASES (INVERSE_RMS + 8)
#define NORM (BASES + QUERIES)
#define NUMBERS (NORM + 1)

struct Gradients {
  const u16 *sources[8];
  const float *scores[8];
  float *coefficients[8];
  const u16 *grads[QUERIES];
  const float *bases[QUERIES];
  const float *weight, *kept, *norm;
  const u16 *prior;  // may be null
  u16 *grad;
  float *partial;
  long long bank_stride;
  int num_tokens, num_sources, total, programs;
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) attnres_block_backward(const Gradients given) {
  extern __shared__ __align__(16) unsigned char memory[];
  u16 *first = (u16 *)memory;                    // [2, WIDTH]: the first gradient in two parts
  float *dots = (float *)(memory + 4 * WIDTH);   // [WARPS, 8, 8]
  float *sums = dots + WARPS * 64;               // [WARPS, 2]
  float *all_numbers = sums + 2 * WARPS;         // [2, NUMBERS]: of this token and of the one before, still being read
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, g = lane >> 2, t = lane & 3;
  int num_sources = given.num_sources, num_tokens = given.num_tokens, column = w * 256 + t * 8;

  // Which number this thread fetches, and from how far apart for neighbouring tokens.
  const float *number_ptr = 0;
  int number_stride = 0;
  const u16 *source_ptr = 0, *grad_row_ptr = 0;
  float *coefficient_ptr = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < num_sources) {
      if (i == g) source_ptr = given.sources[i] + column, coefficient_ptr = given.coefficients[i];
      if (tid == INVERSE_RMS + i) number_ptr = given.scores[i] + given.total, number_stride = given.total + 1;
    }
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    if (q > 0 && q == g - 1) grad_row_ptr = given.grads[q] + column;
    if (q > 0 && tid == BASES + q) number_ptr = given.bases[q], number_stride = 1;
  }
  if (tid < INVERSE_RMS && (tid & 7) < num_sources) {
    int q = tid / 8 % QUERIES, is_score = tid / SCORES;
    number_ptr = given.kept + (q * 2 + is_score) * num_sources + (tid & 7);
    number_stride = QUERIES * 2 * num_sources;
  }
  if (tid == NORM) number_ptr = given.norm, number_stride = 1;
  const u16 *prior_ptr = given.prior && g < num_sources ? given.prior + g * given.bank_stride + column : 0;
  u16 *out_ptr = given.grad + g * given.bank_stride + column;
  bool is_source = g < num_sources;

  float weight_share[8];
#pragma unroll
  for (int k = 0; k < 8; k++) weight_share[k] = 0.0f;

  int parity = 0;
  for (int token = blockIdx.x; token < num_tokens; token += given.programs, parity ^= 1) {
    long long row = (long long)token * WIDTH;
    float *numbers = all_numbers + parity * NUMBERS;
    float number = number_ptr ? number_ptr[(long long)token * number_stride] : 0.0f;
    uint4 v[CHUNKS], gradient[CHUNKS], before[4];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) v[c] = is_source ? load16(source_ptr + row + c * 32) : make_uint4(0, 0, 0, 0);
    uint4 first_in = load16(given.grads[0] + row + tid * 8);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      gradient[c] = grad_row_ptr ? load16(grad_row_ptr + row + c * 32) : make_uint4(0, 0, 0, 0);
    if (token + given.programs < num_tokens) {
      long long next = (long long)(token + given.programs) * WIDTH;
      next += t * 56;  // lane t of a row takes line t of the four (of 128 bytes) that the warp has of it
      if (is_source) prefetch(source_ptr + next);
      if (grad_row_ptr) prefetch(grad_row_ptr + next);
      if (prior_ptr) prefetch(prior_ptr + next);
      if (g == 0) prefetch(given.grads[0] + column + next);
    }
    if (tid < NUMBERS) numbers[tid] = number;
    __syncthreads();

    // The first mix again, and its gradient back through the norm. Row c of the product takes chunk c alone, so that a
    // thread has its eight of the columns of the warp, which are again those that it gets of a row.
    float mix[8], x[8], along = 0.0f, length = 0.0f, norm = numbers[NORM], sum[4][4];
    uint32_t mix_weights = pack(numbers[2 * t], numbers[2 * t + 1]);
    uint32_t mix_rest = pack(numbers[2 * t] - low(mix_weights), numbers[2 * t + 1] - high(mix_weights));
#pragma unroll
    for (int k = 0; k < 16; k++) sum[k / 4][k % 4] = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32_t a[4] = {g == c ? mix_weights : 0, 0, g == c ? mix_rest : 0, 0};
      uint32_t values[4] = {v[c].x, v[c].y, v[c].z, v[c].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t turned_values = turned(values[j]);
        mma_bf16(sum[j], a, turned_values, turned_values);
      }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) mix[k] = sum[k / 2][k % 2];
    unpack(x, first_in);
    float4 weight_a = ((const float4 *)given.weight)[tid * 2], weight_b = ((const float4 *)given.weight)[tid * 2 + 1];
    float weight[8] = {weight_a.x, weight_a.y, weight_a.z, weight_a.w, weight_b.x, weight_b.y, weight_b.z, weight_b.w};
#pragma unroll
    for (int k = 0; k < 8; k++) {
      float unit = mix[k] * norm;
      weight_share[k] += x[k] * unit;
      x[k] *= weight[k];
      along += x[k] * unit;
      length += unit * unit;
      mix[k] = unit;
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
      along += __shfl_xor_sync(~0u, along, mask);
      length += __shfl_xor_sync(~0u, length, mask);
    }
    if (lane == 0) sums[2 * w] = along, sums[2 * w + 1] = length;
    __syncthreads();
    along = length = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) along += sums[2 * i], length += sums[2 * i + 1];
    float mean = along * (1.0f / WIDTH);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = (x[k] - mix[k] * mean) * norm;
    store_part(first + tid * 8, x);
    store_part(first + WIDTH + tid * 8, x);
    __syncwarp();  // the columns of a warp are the same in both layouts
    if (g < 2)
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) gradient[c] = *(const uint4 *)(first + g * WIDTH + column + c * 32);

    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32_t a[4] = {gradient[c].x, 0, gradient[c].y, 0}, b[4] = {gradient[c].z, 0, gradient[c].w, 0};
      mma_bf16(d, a, v[c].x, v[c].y);
      mma_bf16(d, b, v[c].z, v[c].w);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) before[c] = prior_ptr ? load16(prior_ptr + row + c * 32) : make_uint4(0, 0, 0, 0);
    dots[w * 64 + g * 8 + 2 * t] = d[0];
    dots[w * 64 + g * 8 + 2 * t + 1] = d[1];
    __syncthreads();

    // Source g with queries t and t + 4, in every warp.
    float inverse_rms = numbers[INVERSE_RMS + g], shrink = 0.0f;
#pragma unroll
    for (int q = t; q < QUERIES; q += 4) {
      float dot = 0.0f, base = numbers[BASES + q];
#pragma unroll
      for (int i = 0; i < WARPS; i++) dot += dots[i * 64 + (q ? q + 1 : 0) * 8 + g];
      if (q == 0) {
#pragma unroll
        for (int i = 0; i < WARPS; i++) dot += dots[i * 64 + 8 + g];
        base = num_sources > 1 ? along * (length * (1.0f / WIDTH) - 1.0f) : 0.0f;
      }
      // The weight of a single source is exactly 1 and does not move with its score.
      float ds = numbers[q * 8 + g] * (num_sources > 1 ? dot + base : base);
      shrink += ds * numbers[SCORES + q * 8 + g];
      if (w == 0 && is_source) coefficient_ptr[(long long)token * QUERIES + q] = ds * inverse_rms;
    }
    shrink += __shfl_xor_sync(~0u, shrink, 1);
    shrink += __shfl_xor_sync(~0u, shrink, 2);
    shrink *= -inverse_rms * inverse_rms * (1.0f / WIDTH);

    int even = t ? 2 * t - 1 : 0, odd = 2 * t;  // queries of rows 2 t and 2 t + 1
    float p0 = even < QUERIES ? numbers[even * 8 + g] : 0.0f, p1 = odd < QUERIES ? numbers[odd * 8 + g] : 0.0f;
    if (t == 0) p1 = p0;
    uint32_t weights = pack(p0, p1), rest = pack(p0 - low(weights), p1 - high(weights));
    uint32_t a[4] = {weights, 0, rest, 0};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint32_t in[4] = {before[c % 4].x, before[c % 4].y, before[c % 4].z, before[c % 4].w}, out[4];
      if (c < 4 && prior_ptr) before[c] = load16(prior_ptr + row + (c + 4) * 32);
      uint32_t values[4] = {v[c].x, v[c].y, v[c].z, v[c].w};
      uint32_t rows[4] = {gradient[c].x, gradient[c].y, gradient[c].z, gradient[c].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float dv[4] = {low(in[j]) + shrink * low(values[j]), high(in[j]) + shrink * high(values[j]), 0.0f, 0.0f};
        uint32_t turned_rows = turned(rows[j]);
        mma_bf16(dv, a, turned_rows, turned_rows);
        out[j] = pack(dv[0], dv[1]);
      }
      if (is_source) store16(out_ptr + row + c * 32, make_uint4(out[0], out[1], out[2], out[3]));
    }
  }
  float *share = given.partial + (long long)blockIdx.x * WIDTH + tid * 8;
#pragma unroll
  for (int k = 0; k < 8; k++) share[k] = weight_share[k];
}
