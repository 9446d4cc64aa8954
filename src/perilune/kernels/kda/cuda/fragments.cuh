// A tile of 16 tokens x 16 channels in registers, and sums over intervals of tokens as products with 0/1 matrices.
#define C 64
typedef unsigned short u16;  // bfloat16 or float16 in memory

__device__ __forceinline__ float low(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

// [row half][channel half][2]: a lane's eight numbers.
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
