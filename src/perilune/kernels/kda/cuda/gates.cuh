// The gate: from its input to log2 of the decay, and back for gradients, as in triton_chunk.py and triton_gradients.py.
// GATE: 0 the input is the log decay, 1 softplus, 2 bounded. X: type of the input, X_HALF: its 16 bits are float16.
#define SMALLEST_GATE (-30.0f * LOG2E)
#define SMALLEST_LEARNING_GATE (-12.7f * LOG2E)

__device__ __forceinline__ float number(uint32_t two, int i) {
  if (X_HALF) return from_f16(i ? two >> 16 : two & 0xffffu);
  return i ? high(two) : low(two);
}
// Channels side by side, N of them, 8 or 4.
template <int N, class T> struct Raw;
template <int N> struct Raw<N, u16> {
  uint32_t two[N / 2];
  __device__ __forceinline__ void load(const u16 *from) {
    if (N == 8) {
      uint4 x = *(const uint4 *)from;
      two[0] = x.x, two[1] = x.y, two[N / 2 - 2] = x.z, two[N / 2 - 1] = x.w;
    } else {
      uint2 x = *(const uint2 *)from;
      two[0] = x.x, two[1] = x.y;
    }
  }
  __device__ __forceinline__ float get(int i) const { return number(two[i >> 1], i & 1); }
};
template <int N> struct Raw<N, float> {
  float x[N];
  __device__ __forceinline__ void load(const float *from) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float4 y = *(const float4 *)(from + i);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  }
  __device__ __forceinline__ float get(int i) const { return x[i]; }
};
__device__ __forceinline__ void store_four(u16 *to, const float *x) {
  *(uint2 *)to = X_HALF ? make_uint2(pack_f16(x[0], x[1]), pack_f16(x[2], x[3])) : make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
}
__device__ __forceinline__ void store_four(float *to, const float *x) { *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]); }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + ex2(-LOG2E * x)); }
__device__ __forceinline__ float log2_decay(float z, float rate, float lower_bound) {
  float x = z * LOG2E;
  if (GATE == 1) {
    float e = ex2(-fabsf(x));  // softplus(z) = max(z, 0) + log(1 + e), and log(1 + e) = e where 1 + e would lose it
    x = -rate * (fmaxf(x, 0.0f) + (e < 0x1p-12f ? LOG2E * e : lg2(1.0f + e)));
  }
  if (GATE == 2) x = LOG2E * lower_bound * sigmoid(rate * z);
  return fmaxf(x, SMALLEST_GATE);
}
// Gradient of z = input + bias, given that of the log decay; `decay` is log2 of the decay. rate_part: gradient of log(rate).
__device__ __forceinline__ float gate_gradient(float d_decay, float z, float decay, float rate, float lower_bound, float &rate_part) {
  if (decay < SMALLEST_LEARNING_GATE) return 0.0f;
  if (GATE == 0) return d_decay;
  if (GATE == 1) {
    rate_part += d_decay * decay * (1.0f / LOG2E);
    return -rate * sigmoid(z) * d_decay;
  }
  float e = ex2(-LOG2E * fmaxf(rate * z, -60.0f)), open = __fdividef(1.0f, 1.0f + e);
  float d_z = lower_bound * rate * open * (e * open) * d_decay;
  rate_part += d_z * z;
  return d_z;
}
