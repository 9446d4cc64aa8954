// y = -A^T dD and all that follows from rows of values alone, as chunk_signals of triton_gradients.py.
// One CTA of 4 warps per chunk and head, warp w owns tokens 16 w .. 16 w + 15. The kernel lives by bandwidth: everything is
// asked for at the start, and memory is touched 16 bytes a lane, V / 8 lanes on a row. Products take their operands from
// shared memory; a row's sums and d_v are formed in the layout of the rows, so they need no way through it.
#define LANES (V / 8)            // on one row
#define ROWS (32 / LANES)        // of a warp's pass
#define PASSES (16 / ROWS)
#ifndef V_AT
#define V_AT 1
#endif
#ifndef CTAS
#define CTAS 4
#endif

// The vector of 16 bytes at row and vector `at` of a tile without padding: eight rows of one column meet no bank twice.
__device__ __forceinline__ u16 *vector_of(u16 *tile, int width, int row, int at) { return tile + row * width + ((at ^ (row & 7)) << 3); }
__device__ __forceinline__ float dot(const uint4 &a, const uint4 &b) {
  float even = low(a.x) * low(b.x) + low(a.y) * low(b.y) + low(a.z) * low(b.z) + low(a.w) * low(b.w);
  float odd = high(a.x) * high(b.x) + high(a.y) * high(b.y) + high(a.z) * high(b.z) + high(a.w) * high(b.w);
  return even + odd;
}
#ifdef NO_ALLOCATE
__device__ __forceinline__ uint4 fetched(const u16 *p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
  return x;
}
#else
__device__ __forceinline__ uint4 fetched(const u16 *p) { return *(const uint4 *)p; }
#endif
#ifdef STREAM
#define STORE(p, x) __stcs((uint4 *)(p), x)
#else
#define STORE(p, x) *(uint4 *)(p) = x
#endif
// Two tiles of 8 columns side by side, as the products leave them.
__device__ __forceinline__ Four joined(const float (&a)[4], const float (&b)[4]) {
  return {{pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])}};
}
// x[p]: a lane's share of the row of pass p. Returns the whole sum of the row of pass (lane % LANES) / 2.
__device__ __forceinline__ float row_sum(float (&x)[PASSES], int lane) {
  int mask = LANES / 2;
#pragma unroll
  for (int n = PASSES / 2; n > 0; n >>= 1, mask >>= 1)
#pragma unroll
    for (int i = 0; i < n; i++) {
      float mine = lane & mask ? x[i + n] : x[i], other = lane & mask ? x[i] : x[i + n];
      x[i] = mine + __shfl_xor_sync(~0u, other, mask);
    }
  return x[0] + __shfl_xor_sync(~0u, x[0], 1);
}

extern "C" __global__ void __launch_bounds__(128, CTAS) kda_signals(
    const u16 *v, const float *beta, const u16 *o, const u16 *d_o, const u16 *A, const u16 *writes, const long long *chunk_start,
    const int *chunk_length, u16 *signals /* dD in, y out */, u16 *d_L, u16 *d_P, u16 *d_v, float *along,
    float *d_beta /* values' part */, int v_token, int v_head, int beta_token, int beta_head, int o_token, int o_head,
    int do_token, int do_head, int H, double beta_max_, int beta_sigmoid) {
  extern __shared__ __align__(16) unsigned char memory[];
  u16 *sy = (u16 *)memory, *sd = sy + C * V, *so = sd + C * V, *sa = so + C * V;  // dD then y, D, do then dP, A then dL
#ifdef OUT_TILE
  u16 *st = sa + C * C;  // o, then v
#endif
  long long record = blockIdx.x, chunk = record / H;
  int head = record % H, length = chunk_length[chunk];
  if (length == 0) return;
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, at = lane % LANES, first_row = 16 * w + lane / LANES;
  long long token = chunk_start[chunk] + first_row;
  auto is_on = [&](int pass) { return first_row + pass * ROWS < length; };
  const u16 *from_signals = signals + (record * C + first_row) * V + at * 8, *from_writes = writes + (record * C + first_row) * V + at * 8;
  const u16 *from_out = d_o + token * do_token + (long long)head * do_head + at * 8;
  const u16 *from_o = o + token * o_token + (long long)head * o_head + at * 8;
  const u16 *from_v = v + token * v_token + (long long)head * v_head + at * 8;
#pragma unroll
  for (int j = 0; j < 4; j++) {  // only the blocks of A that are not above its diagonal
    int row = 16 * j + tid / 8, part = tid & 7;
    if (part / 2 <= j) copy16(vector_of(sa, C, row, part), A + (record * C + row) * C + part * 8, true);
  }
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    int row = first_row + p * ROWS;
    copy16(vector_of(sy, V, row, at), from_signals + p * ROWS * V, true);
  }
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    int row = first_row + p * ROWS;
    bool on = is_on(p);
    copy16(vector_of(sd, V, row, at), from_writes + p * ROWS * V, true);
    copy16(vector_of(so, V, row, at), on ? from_out + p * ROWS * (long long)do_token : d_o, on);
#ifdef OUT_TILE
    copy16(vector_of(st, V, row, at), on ? from_o + p * ROWS * (long long)o_token : o, on);
#endif
  }
  commit_copies();
#ifndef OUT_TILE
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  uint4 answers[PASSES], values[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++) answers[p] = is_on(p) ? fetched(from_o + p * ROWS * (long long)o_token) : zeros;
#if V_AT == 0
#pragma unroll
  for (int p = 0; p < PASSES; p++) values[p] = is_on(p) ? fetched(from_v + p * ROWS * (long long)v_token) : zeros;
#endif
#endif
#ifdef PREFETCH
  if (at % 8 == 0)
    for (int p = 0; p < PASSES; p++)
      if (is_on(p)) asm volatile("prefetch.global.L2 [%0];" ::"l"(from_v + p * ROWS * (long long)v_token));
#endif
  float strength = 0.0f;  // of row 16 w + lane % 16
  {
    int row = 16 * w + (lane & 15);
    if (row < length) {
      strength = beta[(token - first_row + row) * beta_token + (long long)head * beta_head];
      if (beta_sigmoid) strength = (float)beta_max_ / (1.0f + __expf(-strength));
    }
  }
  wait_for_copies();
  __syncthreads();

  float shares[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    int row = first_row + p * ROWS;
    uint4 out = *(const uint4 *)vector_of(so, V, row, at);
#ifdef OUT_TILE
    uint4 *place = (uint4 *)vector_of(st, V, row, at);
    bool on = is_on(p);
    shares[p] = dot(out, *place);
    copy16(place, on ? from_v + p * ROWS * (long long)v_token : v, on);  // the same lane has read it
#else
    shares[p] = dot(out, answers[p]);
#endif
  }
  commit_copies();
  float query_along = row_sum(shares, lane);
#if V_AT == 1 && !defined(OUT_TILE)
#pragma unroll
  for (int p = 0; p < PASSES; p++) values[p] = is_on(p) ? fetched(from_v + p * ROWS * (long long)v_token) : zeros;
#endif

  Four y[V / 16], turned_A[4];
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (j >= w) ldmatrix_trans(turned_A[j].r, vector_of(sa, C, 16 * j + (lane & 7) + (lane >> 4) * 8, 2 * w + (lane >> 3 & 1)));
#pragma unroll
  for (int c = 0; c < V / 16; c++) {
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (j >= w) {
        Four x;
        ldmatrix_trans(x.r, vector_of(sy, V, 16 * j + (lane & 15), 2 * c + (lane >> 4)));
        mma_bf16(lo, turned_A[j].r, x.r[0], x.r[1]);
        mma_bf16(hi, turned_A[j].r, x.r[2], x.r[3]);
      }
    y[c] = joined(lo, hi);
#pragma unroll
    for (int i = 0; i < 4; i++) y[c].r[i] ^= 0x80008000u;  // minus
  }
  __syncthreads();  // dD and A have been read
#if V_AT == 2 && !defined(OUT_TILE)
#pragma unroll
  for (int p = 0; p < PASSES; p++) values[p] = is_on(p) ? fetched(from_v + p * ROWS * (long long)v_token) : zeros;
#endif
  int gr = lane >> 2, t = lane & 3, row = 16 * w + gr;
  auto put = [&](u16 *tile, int width, int c, const Four &f) {
    ((uint32_t *)vector_of(tile, width, row, 2 * c))[t] = f.r[0];
    ((uint32_t *)vector_of(tile, width, row + 8, 2 * c))[t] = f.r[1];
    ((uint32_t *)vector_of(tile, width, row, 2 * c + 1))[t] = f.r[2];
    ((uint32_t *)vector_of(tile, width, row + 8, 2 * c + 1))[t] = f.r[3];
  };
#pragma unroll
  for (int c = 0; c < V / 16; c++) put(sy, V, c, y[c]);
  __syncwarp();
  Four pairs[4];
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (j <= w) {
      float write0[4] = {}, write1[4] = {}, read0[4] = {}, read1[4] = {};
#pragma unroll
      for (int c = 0; c < V / 16; c++) {
        Four column, signal, out;
        ldmatrix(column.r, vector_of(sd, V, 16 * j + (lane & 15), 2 * c + (lane >> 4)));
        ldmatrix(signal.r, vector_of(sy, V, 16 * w + (lane & 15), 2 * c + (lane >> 4)));
        ldmatrix(out.r, vector_of(so, V, 16 * w + (lane & 15), 2 * c + (lane >> 4)));
        mma_bf16(write0, signal.r, column.r[0], column.r[2]);
        mma_bf16(write1, signal.r, column.r[1], column.r[3]);
        mma_bf16(read0, out.r, column.r[0], column.r[2]);
        mma_bf16(read1, out.r, column.r[1], column.r[3]);
      }
      if (j == w) {
        int i = gr, k = 2 * t;
#pragma unroll
        for (int e = 0; e < 4; e++, k ^= 1, i += (e == 2) * 8) {
          if (i <= k) write0[e] = 0.0f;
          if (i <= k + 8) write1[e] = 0.0f;
          if (i < k) read0[e] = 0.0f;
          if (i < k + 8) read1[e] = 0.0f;
        }
      }
      put(sa, C, j, joined(write0, write1));
      pairs[j] = joined(read0, read1);
    }
  __syncwarp();  // do has been read
  u16 *sp = so + 16 * w * (V - C);  // row 16 w of dP where row 16 w of do was
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (j <= w) put(sp, C, j, pairs[j]);
#ifdef OUT_TILE
  wait_for_copies();
#endif
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int here = 16 * w + 4 * i + lane / 8, part = lane & 7;
    long long to = (record * C + here) * C + part * 8;
    bool below = part / 2 <= w;
#ifdef LOWER_ONLY
    if (!below) continue;
#endif
    STORE(d_L + to, (below ? *(const uint4 *)vector_of(sa, C, here, part) : make_uint4(0, 0, 0, 0)));
    STORE(d_P + to, (below ? *(const uint4 *)vector_of(sp, C, here, part) : make_uint4(0, 0, 0, 0)));
  }
  float writes_share[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    int here = first_row + p * ROWS;
    uint4 signal = *(const uint4 *)vector_of(sy, V, here, at), write = *(const uint4 *)vector_of(sd, V, here, at);
#ifdef OUT_TILE
    uint4 value = *(const uint4 *)vector_of(st, V, here, at);
#else
    uint4 value = values[p];
#endif
    STORE(signals + (record * C + here) * V + at * 8, signal);
    shares[p] = dot(signal, value);
    writes_share[p] = dot(signal, write);
    float factor = -__shfl_sync(~0u, strength, lane / LANES + p * ROWS);
    auto scaled = [&](uint32_t x) { return pack(low(x) * factor, high(x) * factor); };
    if (is_on(p))
      STORE(d_v + ((token + p * ROWS) * H + head) * V + at * 8,
          make_uint4(scaled(signal.x), scaled(signal.y), scaled(signal.z), scaled(signal.w)));
  }
  float on_values = row_sum(shares, lane), on_writes = row_sum(writes_share, lane);
  int pass = at / 2;
  strength = __shfl_sync(~0u, strength, lane / LANES + pass * ROWS);
  if ((lane & 1) == 0 && is_on(pass)) {
    long long place = (token + pass * ROWS) * H + head;
    *(float2 *)(along + place * 2) = make_float2(query_along, strength * on_values - 2.0f * on_writes);
    d_beta[place] = -on_values;
  }
}
