// A tile of 16 tokens x 16 channels in registers, and sums over intervals of tokens as products with 0/1 matrices.
// Columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the tensor cores' tile, those of one lane, are channels 4 t .. 4 t + 3: eight
// bytes, so that the four lanes of a row cover a whole sector of 32 bytes.
#define C 64
typedef unsigned short u16;  // bfloat16 or float16 in memory

__device__ __forceinline__ float low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// [row half][4 channels]: a lane's eight numbers.
struct Tile { float v[8]; };
// The same as an operand of 16 bits: A, or by pairs (r0, r2), (r1, r3) two B operands of 8 tokens each.
struct Four { uint32_t r[4]; };

__device__ __forceinline__ Tile tile_of(const float (&a)[4], const float (&b)[4]) {
  return {{a[0], a[1], b[0], b[1], a[2], a[3], b[2], b[3]}};
}
__device__ __forceinline__ Four packed(const Tile &x) {
  return {{pack(x.v[0], x.v[1]), pack(x.v[4], x.v[5]), pack(x.v[2], x.v[3]), pack(x.v[6], x.v[7])}};
}
__device__ __forceinline__ Tile unpacked(const Four &f) {
  return {{low(f.r[0]), high(f.r[0]), low(f.r[2]), high(f.r[2]), low(f.r[1]), high(f.r[1]), low(f.r[3]), high(f.r[3])}};
}
// B operand whose sum runs over tokens: (r0, r1) for channels 0-7, (r2, r3) for channels 8-15.
__device__ __forceinline__ Four turned(const Four &f) {
  return {{turned(f.r[0]), turned(f.r[1]), turned(f.r[2]), turned(f.r[3])}};
}
__device__ __forceinline__ Tile times(const Tile &a, const Tile &b) {
  Tile p;
  for (int i = 0; i < 8; i++) p.v[i] = a.v[i] * b.v[i];
  return p;
}
// An A operand of zeros and ones (one: the number 1 in 16 bits): is column t of row i inside?
template <class F> __device__ __forceinline__ void mask_operand(uint32_t (&a)[4], int lane, uint32_t one, F inside) {
  int g = lane >> 2, t = (lane & 3) * 2;
  auto two = [&](int i, int c) { return (inside(i, c) ? one : 0u) | (inside(i, c + 1) ? one << 16 : 0u); };
  a[0] = two(g, t);
  a[1] = two(g + 8, t);
  a[2] = two(g, t + 8);
  a[3] = two(g + 8, t + 8);
}
// Sums of the gates, an operand over tokens in float16, over the intervals of a mask.
__device__ __forceinline__ Tile sums(const uint32_t (&mask)[4], const Four &gates) {
  float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
  mma_f16(a, mask, gates.r[0], gates.r[1]);
  mma_f16(b, mask, gates.r[2], gates.r[3]);
  return tile_of(a, b);
}
#define ONE_F16 0x3c00u
#define ONE_BF16 0x3f80u
#define LOG2E 1.4426950408889634f
// Pairs inside eight tokens share an anchor; their gates are clamped at -12, their factors centred (see triton_chunk.py).
#define SMALLEST_OCTET_GATE (-12.0f * LOG2E)
#define OCTET_CENTRE (-48.0f * LOG2E)

// The same where columns keep their order: lanes swap with their neighbours, and each has four columns side by side, from
// `neighbours_column` on. a, b: columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of a row.
__device__ __forceinline__ int neighbours_column(int lane) { return (lane & 1) * 8 + (lane & 2) * 2; }
__device__ __forceinline__ uint2 with_neighbours(uint32_t a, uint32_t b, int lane) {
  bool odd = lane & 1;
  uint32_t other = __shfl_xor_sync(~0u, odd ? a : b, 1);
  return odd ? make_uint2(other, b) : make_uint2(a, other);
}
__device__ __forceinline__ uint2 from_neighbours(uint2 x, int lane) {
  bool odd = lane & 1;
  uint32_t other = __shfl_xor_sync(~0u, odd ? x.x : x.y, 1);
  return odd ? make_uint2(other, x.y) : make_uint2(x.x, other);
}
// Where eight channels of a row lie in shared memory: rows without padding, neither ldmatrix nor 8 bytes a lane conflict.
template <int WIDTH> __device__ __forceinline__ int spot(int row, int eight) {
  return row * WIDTH + ((eight ^ ((row << 1 & 6) | (row >> 2 & 1))) << 3);
}

// Sums of gates [4 blocks][K] up to a block's start, and from there to the end of the chunk.
__device__ __forceinline__ void add_up(const float *totals, float *befores, float *afters, int tid) {
  for (int i = tid; i < K; i += 128) {
    float a = totals[i], b = totals[K + i], d = totals[2 * K + i], e = totals[3 * K + i];
    befores[i] = 0.0f, befores[K + i] = a, befores[2 * K + i] = a + b, befores[3 * K + i] = a + b + d;
    afters[i] = a + b + d + e, afters[K + i] = b + d + e, afters[2 * K + i] = d + e, afters[3 * K + i] = e;
  }
}
// Factors of levels 16 and 32. Level 16: odd blocks are rows, even ones columns; level 32: the last two are rows. A row
// counts from its block's start, a column to its end, and at level 32 blocks 0 and 3 have another one, `other`, in between.
__device__ __forceinline__ void anchored(Tile &x16, Tile &x32, const Tile &prefix, float4 own4, float4 other4, int w) {
  const float own[4] = {own4.x, own4.y, own4.z, own4.w}, other[4] = {other4.x, other4.y, other4.z, other4.w};
  const float sign16 = w & 1 ? 1.0f : -1.0f, sign32 = w & 2 ? 1.0f : -1.0f;
  float base16[4], base32[4];
  for (int j = 0; j < 4; j++) {
    base16[j] = w & 1 ? 0.0f : own[j];
    base32[j] = (w & 2 ? 0.0f : own[j]) + (w == 0 || w == 3 ? other[j] : 0.0f);
  }
  for (int i = 0; i < 8; i++) {
    x16.v[i] = ex2(base16[i & 3] + sign16 * prefix.v[i]);
    x32.v[i] = ex2(base32[i & 3] + sign32 * prefix.v[i]);
  }
}
