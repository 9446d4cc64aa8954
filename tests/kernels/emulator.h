// Runs one CTA of a CUDA kernel on the CPU: a std::thread per CUDA thread, warp-wide instructions through per-warp barriers.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#include <condition_variable>
#include <mutex>
#include <functional>
struct Barrier { std::mutex m; std::condition_variable v; int n, c = 0, gen = 0; explicit Barrier(int n) : n(n) {}
  void wait() { std::unique_lock<std::mutex> l(m); int g = gen; if (++c == n) { c = 0; gen++; v.notify_all(); } else v.wait(l, [&] { return gen != g; }); } };
struct Warp { Barrier b{32}; uint32_t u[32][12]; const void *p[32]; };
static Warp *emu_warps; static Barrier *emu_cta; static unsigned char *emu_shared;
struct Dim { int x; }; static thread_local Dim threadIdx; static thread_local Dim blockIdx;
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __syncthreads() emu_cta->wait()
struct uint4 { uint32_t x, y, z, w; }; struct float2 { float x, y; }; struct uint2 { uint32_t x, y; };
inline uint2 make_uint2(uint32_t a, uint32_t b) { return {a, b}; }
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; } inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); } inline float __expf(float x) { return expf(x); }
inline float u2f(uint32_t u) { float f; memcpy(&f, &u, 4); return f; } inline uint32_t f2u(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(uint32_t u) { return u2f(u); }
inline Warp &warp() { return emu_warps[threadIdx.x >> 5]; } inline int lane_() { return threadIdx.x & 31; }
inline float b16(uint32_t h) { return u2f(h << 16); }
inline uint32_t to_b16(float f) { uint32_t u = f2u(f); if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0; return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
inline float h16(uint32_t h) { _Float16 x; uint16_t s = h; memcpy(&x, &s, 2); return (float)x; }
inline uint32_t to_h16(float f) { _Float16 x = (_Float16)f; uint16_t s; memcpy(&s, &x, 2); return s; }
inline uint32_t pack(float lo, float hi) { return to_b16(lo) | to_b16(hi) << 16; }
inline uint32_t pack_f16(float lo, float hi) { return to_h16(lo) | to_h16(hi) << 16; }
inline uint32_t max_f16x2(uint32_t a, uint32_t b) { auto m = [](uint32_t x, uint32_t y) { return h16(x & 0xffff) > h16(y & 0xffff) ? x & 0xffff : y & 0xffff; }; return m(a, b) | m(a >> 16, b >> 16) << 16; }
inline float ex2(float x) { float y = exp2f(x); return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y; }
inline float lg2(float x) { return log2f(x); } inline float from_f16(uint32_t x) { return h16(x); } inline float __fdividef(float a, float b) { return a / b; }
template <class D> inline void emu_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, D decode) {
  Warp &w = warp(); int l = lane_(); for (int i = 0; i < 4; i++) w.u[l][i] = a[i]; w.u[l][4] = b0; w.u[l][5] = b1; w.b.wait();
  int g = l >> 2, t = (l & 3) * 2; float o[4];
  for (int e = 0; e < 4; e++) { int row = g + (e >> 1) * 8, col = t + (e & 1); double s = d[e];
    for (int k = 0; k < 16; k++) { int al = (row & 7) * 4 + (k & 7) / 2, ar = (row >> 3) + (k >> 3) * 2, bl = (col & 7) * 4 + (k & 7) / 2, br = 4 + (k >> 3);
      s += (double)decode(w.u[al][ar] >> ((k & 1) * 16) & 0xffff) * decode(w.u[bl][br] >> ((k & 1) * 16) & 0xffff); }
    o[e] = (float)s; }
  w.b.wait(); for (int e = 0; e < 4; e++) d[e] = o[e];
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emu_mma(d, a, b0, b1, h16); }
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { emu_mma(d, a, b0, b1, b16); }
inline uint32_t turned(uint32_t x) { Warp &w = warp(); int l = lane_(); w.u[l][6] = x; w.b.wait(); int g = l >> 2, t = (l & 3) * 2;
  auto at = [&](int r, int c) { return w.u[r * 4 + c / 2][6] >> ((c & 1) * 16) & 0xffff; }; uint32_t o = at(t, g) | at(t + 1, g) << 16; w.b.wait(); return o; }
inline uint32_t turned_again(uint32_t x) { return turned(x); }
inline void emu_ldmatrix(uint32_t (&r)[4], const void *p, bool trans) { Warp &w = warp(); int l = lane_(); w.p[l] = p; w.b.wait(); int g = l >> 2, t = (l & 3) * 2;
  for (int m = 0; m < 4; m++) { auto at = [&](int row, int c) { return (uint32_t)((const uint16_t *)w.p[m * 8 + row])[c]; };
    r[m] = trans ? (at(t, g) | at(t + 1, g) << 16) : (at(g, t) | at(g, t + 1) << 16); } w.b.wait(); }
inline void ldmatrix_trans(uint32_t (&r)[4], const void *p) { emu_ldmatrix(r, p, true); } inline void ldmatrix(uint32_t (&r)[4], const void *p) { emu_ldmatrix(r, p, false); }
inline void copy16(void *d, const void *s, bool on) { if (on) memcpy(d, s, 16); else memset(d, 0, 16); }
inline uint2 load8(const void *p) { return *(const uint2 *)p; }
inline void commit_copies() {}
inline void wait_for_copies() {}
inline float __shfl_xor_sync(unsigned, float x, int m) { Warp &w = warp(); int l = lane_(); w.u[l][7] = f2u(x); w.b.wait(); float y = u2f(w.u[l ^ m][7]); w.b.wait(); return y; }
inline uint32_t __shfl_xor_sync(unsigned, uint32_t x, int m) { Warp &w = warp(); int l = lane_(); w.u[l][7] = x; w.b.wait(); uint32_t y = w.u[l ^ m][7]; w.b.wait(); return y; }
inline void __syncwarp() { warp().b.wait(); }
inline void emu_run(int blocks, int shared, std::function<void()> kernel, int threads = 128) {
  for (int b = 0; b < blocks; b++) { std::vector<Warp> warps(threads / 32); Barrier cta(threads); std::vector<unsigned char> memory(shared + 64, 0xff); emu_warps = warps.data(); emu_cta = &cta; emu_shared = (unsigned char *)(((uintptr_t)memory.data() + 15) & ~15ull);
    std::vector<std::thread> ts; for (int t = 0; t < threads; t++) ts.emplace_back([=] { threadIdx.x = t; blockIdx.x = b; kernel(); }); for (auto &t : ts) t.join(); }
}
inline float __shfl_sync(unsigned, float x, int from) { Warp &w = warp(); w.u[lane_()][7] = f2u(x); w.b.wait(); float y = u2f(w.u[from & 31][7]); w.b.wait(); return y; }
inline void store16(void *to, const uint4 &x) { memcpy(to, &x, 16); }
