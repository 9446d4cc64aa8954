// y = -A^T dD and all that follows from rows of values alone, as chunk_signals of triton_gradients.py.
// One CTA of 4 warps per chunk and head, warp w owns tokens 16 w .. 16 w + 15. Bandwidth is all that counts: everything
// is asked for at once, and memory is touched 16 bytes a lane, V / 8 lanes on a row. Row sums and d_v are formed in
// this layout too, v and o wait in registers for it; the products go through shared memory to reach it.
#define LANES (V / 8)        // on one row
#define ROWS (32 / LANES)    // of a warp's pass
#define PASSES (16 / ROWS)

// Vector `at` (16 bytes) of a row, in a tile without padding: eight rows of one column of vectors share no bank.
__device__ __forceinline__ u16 *vector_of(u16 *tile, int width, int row, int at) {
  return tile + row * width + ((at ^ (row & 7)) << 3);
}
__device__ __forceinline__ float dot(const uint4 &a, const uint4 &b) {
  float even = low(a.x) * low(b.x) + low(a.y) * low(b.y) + low(a.z) * low(b.z) + low(a.w) * low(b.w);
  float odd = high(a.x) * high(b.x) + high(a.y) * high(b.y) + high(a.z) * high(b.z) + high(a.w) * high(b.w);
  return even + odd;
}
// Two tiles of 8 columns side by side, as the products leave them.
__device__ __forceinline__ Four joined(const float (&a)[4], const float (&b)[4]) {
  return {{pack(a[0], a[1]), pack(a[2], a[3]), pack(b[0], b[1]), pack(b[2], b[3])}};
}
// x[p]: a lane's share of its row of pass p. Returns the whole sum of the row of pass (lane % LANES) / 2.
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

extern "C" __global__ void __launch_bounds__(128, 3) kda_signals(
    const u16 *v, const float *beta, const u16 *o, const u16 *d_o, const u16 *A, const u16 *writes,
    const long long *chunk_start, const int *chunk_length, u16 *signals /* dD in, y out */, u16 *d_L, u16 *d_P,
    u16 *d_v, float *along, float *d_beta /* values' part */, int v_token, int v_head, int beta_token, int beta_head,
    int o_token, int o_head, int do_token, int do_head, int H, double beta_max, int beta_sigmoid) {
  extern __shared__ __align__(16) unsigned char memory[];
  u16 *sy = (u16 *)memory, *sd = sy + C * V, *so = sd + C * V, *sa = so + C * V;  // dD then y; D; do then dP; A then dL
  long long record = blockIdx.x, chunk = record / H;
  int head = record % H, length = chunk_length[chunk];
  if (length == 0) return;
  int tid = threadIdx.x, lane = tid & 31, w = tid >> 5;
  int at = lane % LANES, first_row = 16 * w + lane / LANES;
  long long token = chunk_start[chunk] + first_row, tile = (record * C + first_row) * V + at * 8;
  auto is_on = [&](int pass) { return first_row + pass * ROWS < length; };
#pragma unroll
  for (int j = 0; j < 4; j++) {  // A is zero above its diagonal
    int row = 16 * j + tid / 8, part = tid & 7;
    if (part / 2 <= j) copy16(vector_of(sa, C, row, part), A + (record * C + row) * C + part * 8, true);
  }
  const u16 *from_out = d_o + token * do_token + (long long)head * do_head + at * 8;
  const u16 *from_o = o + token * o_token + (long long)head * o_head + at * 8;
  const u16 *from_v = v + token * v_token + (long long)head * v_head + at * 8;
#pragma unroll
  for (int p = 0; p < PASSES; p++)
    copy16(vector_of(sy, V, first_row + p * ROWS, at), signals + tile + p * ROWS * V, true);
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    int row = first_row + p * ROWS;
    bool on = is_on(p);
    copy16(vector_of(sd, V, row, at), writes + tile + p * ROWS * V, true);
    copy16(vector_of(so, V, row, at), on ? from_out + p * ROWS * (long long)do_token : d_o, on);
  }
  commit_copies();
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  uint4 answers[PASSES], values[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++)
    answers[p] = is_on(p) ? *(const uint4 *)(from_o + p * ROWS * (long long)o_token) : zeros;
#pragma unroll
  for (int p = 0; p < PASSES; p++)
    values[p] = is_on(p) ? *(const uint4 *)(from_v + p * ROWS * (long long)v_token) : zeros;
  float strength = 0.0f;  // of row 16 w + lane % 16
  if (16 * w + (lane & 15) < length) {
    strength = beta[(token - first_row + 16 * w + (lane & 15)) * beta_token + (long long)head * beta_head];
    if (beta_sigmoid) strength = (float)beta_max / (1.0f + __expf(-strength));
  }
  wait_for_copies();
  __syncthreads();

  float shares[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++)
    shares[p] = dot(*(const uint4 *)vector_of(so, V, first_row + p * ROWS, at), answers[p]);
  float query_along = row_sum(shares, lane);

  Four y[V / 16], turned_A[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int from = 16 * j + (lane & 7) + (lane >> 4) * 8;
    if (j >= w) ldmatrix_trans(turned_A[j].r, vector_of(sa, C, from, 2 * w + (lane >> 3 & 1)));
  }
#pragma unroll
  for (int c = 0; c < V / 16; c++) {
    float lo[4] = {}, hi[4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (j >= w) {
        uint32_t x[4];
        ldmatrix_trans(x, vector_of(sy, V, 16 * j + (lane & 15), 2 * c + (lane >> 4)));
        mma_bf16(lo, turned_A[j].r, x[0], x[1]);
        mma_bf16(hi, turned_A[j].r, x[2], x[3]);
      }
    y[c] = joined(lo, hi);
#pragma unroll
    for (int i = 0; i < 4; i++) y[c].r[i] ^= 0x80008000u;  // minus
  }
  __syncthreads();  // dD and A have been read
  int gr = lane >> 2, t = lane & 3, row = 16 * w + gr;
  auto put = [&](u16 *to, int width, int c, const Four &f) {
    ((uint32_t *)vector_of(to, width, row, 2 * c))[t] = f.r[0];
    ((uint32_t *)vector_of(to, width, row + 8, 2 * c))[t] = f.r[1];
    ((uint32_t *)vector_of(to, width, row, 2 * c + 1))[t] = f.r[2];
    ((uint32_t *)vector_of(to, width, row + 8, 2 * c + 1))[t] = f.r[3];
  };
#pragma unroll
  for (int c = 0; c < V / 16; c++) put(sy, V, c, y[c]);
  __syncwarp();
  Four reads[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float write0[4] = {}, write1[4] = {}, read0[4] = {}, read1[4] = {};
    if (j <= w) {
#pragma unroll
      for (int c = 0; c < V / 16; c++) {
        uint32_t column[4], signal[4], out[4];
        ldmatrix(column, vector_of(sd, V, 16 * j + (lane & 15), 2 * c + (lane >> 4)));
        ldmatrix(signal, vector_of(sy, V, 16 * w + (lane & 15), 2 * c + (lane >> 4)));
        ldmatrix(out, vector_of(so, V, 16 * w + (lane & 15), 2 * c + (lane >> 4)));
        mma_bf16(write0, signal, column[0], column[2]);
        mma_bf16(write1, signal, column[1], column[3]);
        mma_bf16(read0, out, column[0], column[2]);
        mma_bf16(read1, out, column[1], column[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int i = row + (e >> 1) * 8, k = 16 * j + 2 * t + (e & 1);
      write0[e] = i > k ? write0[e] : 0.0f;
      write1[e] = i > k + 8 ? write1[e] : 0.0f;
      read0[e] = i >= k ? read0[e] : 0.0f;
      read1[e] = i >= k + 8 ? read1[e] : 0.0f;
    }
    put(sa, C, j, joined(write0, write1));
    reads[j] = joined(read0, read1);
  }
  __syncwarp();  // do has been read
  u16 *sp = so + 16 * w * (V - C);  // row 16 w of dP begins where row 16 w of do did
#pragma unroll
  for (int j = 0; j < 4; j++) put(sp, C, j, reads[j]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int here = 16 * w + 4 * i + lane / 8, part = lane & 7;
    long long to = (record * C + here) * C + part * 8;
    store16(d_L + to, *(const uint4 *)vector_of(sa, C, here, part));
    store16(d_P + to, *(const uint4 *)vector_of(sp, C, here, part));
  }
  float writes_shares[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    int here = first_row + p * ROWS;
    uint4 signal = *(const uint4 *)vector_of(sy, V, here, at);
    store16(signals + tile + p * ROWS * V, signal);
    shares[p] = dot(signal, values[p]);
    writes_shares[p] = dot(signal, *(const uint4 *)vector_of(sd, V, here, at));
    float factor = -__shfl_sync(~0u, strength, lane / LANES + p * ROWS);
    auto scaled = [&](uint32_t x) { return pack(low(x) * factor, high(x) * factor); };
    uint4 d_value = make_uint4(scaled(signal.x), scaled(signal.y), scaled(signal.z), scaled(signal.w));
    if (is_on(p)) store16(d_v + ((token + p * ROWS) * H + head) * V + at * 8, d_value);
  }
  float on_values = row_sum(shares, lane), on_writes = row_sum(writes_shares, lane);
  int pass = at / 2;
  strength = __shfl_sync(~0u, strength, lane / LANES + pass * ROWS);
  if ((lane & 1) == 0 && is_on(pass)) {
    long long place = (token + pass * ROWS) * H + head;
    *(float2 *)(along + place * 2) = make_float2(query_along, strength * on_values - 2.0f * on_writes);
    d_beta[place] = -on_values;
  }
}
