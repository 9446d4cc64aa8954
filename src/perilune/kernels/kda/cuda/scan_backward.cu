// The recurrence backwards, as scan_chunks_backward of triton_scan.py (without transitions), laid out as in scan.cu:
//
//     dD = P^T do + to_end dS        dS <- state_decay * dS + from_start^T do - W^T dD
//
// Kept for the gradients inside chunks: dS after every chunk and dD in bfloat16, and state_decay * sum_v S dS.
#define BV 32
#define STAGES 3

extern "C" __global__ void __launch_bounds__(256, 1) kda_scan_backward(
    const u16 *W, const u16 *to_end, const u16 *from_start, const u16 *P, const float *state_decay, const u16 *d_o,
    const u16 *states, const int *run_first_chunk, const int *run_num_chunks, const long long *chunk_start,
    const int *chunk_length, const float *d_final, u16 *d_states, u16 *d_writes, float *d_initial, float *flows,
    int do_token, int do_head, int H, int has_final) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int stage_size = C * (3 * K + C + BV) + K * BV + 2 * K;  // in u16: to_end, from_start, W, P, do, states, decay
  u16 *stages = (u16 *)memory, *sS = stages + STAGES * stage_size, *sD = sS + K * BV;
  const int block = blockIdx.x % (V / BV), head = blockIdx.x / (V / BV) % H, run = blockIdx.x / (V / BV) / H;
  const int tid = threadIdx.x, lane = tid & 31, w = tid >> 5, gr = lane >> 2, t2 = (lane & 3) * 2;
  const long long first_chunk = run_first_chunk[run];
  const int num_chunks = run_num_chunks[run];
  long long first_token = 0;
  int num_tokens = 0;
  if (num_chunks > 0) {
    first_token = chunk_start[first_chunk];
    num_tokens = (int)(chunk_start[first_chunk + num_chunks - 1] - first_token) + chunk_length[first_chunk + num_chunks - 1];
  }
  const u16 *d_o_at = d_o + first_token * do_token + (long long)head * do_head + block * BV + tid % 4 * 8;
  auto fetch = [&](int step, int stage) {
    if (step < num_chunks) {
      u16 *to = stages + stage * stage_size;
      const int index = num_chunks - 1 - step;
      const long long record = (first_chunk + index) * H + head;
#pragma unroll
      for (int j = 0; j < C * K / 2048; j++) {
        int at = spot<K>(tid / (K / 8), tid % (K / 8)) + j * 2048, from = tid * 8 + j * 2048;  // a multiple of 8 rows on
        copy16(to + at, to_end + record * C * K + from, true);
        copy16(to + C * K + at, from_start + record * C * K + from, true);
        copy16(to + 2 * C * K + at, W + record * C * K + from, true);
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
        copy16(to + 3 * C * K + spot<C>(tid / 8, tid % 8) + j * 2048, P + record * C * C + tid * 8 + j * 2048, true);
      int local = index * C + tid / 4;
      bool on = local < num_tokens;
      copy16(to + 3 * C * K + C * C + spot32(tid / 4, tid % 4), d_o_at + (on ? local : 0) * (long long)do_token, on);
#pragma unroll
      for (int j = 0; j < K / 64; j++)  // 64 rows on
        copy16(to + C * (3 * K + C + BV) + spot32(tid / 4, tid % 4) + j * 2048,
               states + (record * K + 64 * j + tid / 4) * V + block * BV + tid % 4 * 8, true);
      if (tid < K / 4) copy16(to + C * (3 * K + C + BV) + K * BV + tid * 8, state_decay + record * K + tid * 4, true);
    }
    commit_copies();
  };
  fetch(0, 0);
  fetch(1, 1);

  const bool has_keys = 16 * w < K;
  const int key = 16 * w + gr, column = block * BV + t2;
  float dS[4][4] = {};
  const long long state = ((long long)run * H + head) * K * V;
  if (has_final && has_keys)
    for (int n = 0; n < 4; n++)
      for (int i = 0; i < 2; i++) {
        float2 x = *(const float2 *)(d_final + state + (long long)(key + 8 * i) * V + column + 8 * n);
        dS[n][2 * i] = x.x, dS[n][2 * i + 1] = x.y;
      }
  auto round_state = [&]() {
    if (has_keys)
      for (int n = 0; n < 4; n++)
        for (int i = 0; i < 2; i++)
          *(uint32_t *)(sS + spot32(key + 8 * i, n) + t2) = pack(dS[n][2 * i], dS[n][2 * i + 1]);
  };
  round_state();
  const int m = w & 3, half = w >> 2;
  for (int step = 0, stage = 0; step < num_chunks; step++, stage = stage == 2 ? 0 : stage + 1) {
    wait_for_copies_but_one();
    __syncthreads();
    fetch(step + 2, stage == 0 ? 2 : stage - 1);
    const u16 *sK = stages + stage * stage_size, *sF = sK + C * K, *sW = sF + C * K, *sP = sW + C * K;
    const u16 *sO = sP + C * C, *sB = sO + C * BV;
    const float *decay = (const float *)(sB + K * BV);
    const long long record = (first_chunk + num_chunks - 1 - step) * H + head;
    float got[2][2][4] = {};  // [even and odd steps][columns]
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      uint32_t a[4], x[4];
      ldmatrix(a, sK + spot<K>(16 * m + (lane & 15), (k >> 3) + (lane >> 4)));
      ldmatrix_trans(x, sS + spot32(k + (lane & 15), 2 * half + (lane >> 4)));
      mma_bf16(got[k >> 4 & 1][0], a, x[0], x[1]);
      mma_bf16(got[k >> 4 & 1][1], a, x[2], x[3]);
    }
#pragma unroll
    for (int t = 0; t < C; t += 16)
      if (t >= 16 * m) {  // P^T: an output before t has none of t
        uint32_t a[4], x[4];
        ldmatrix_trans(a, sP + spot<C>(t + (lane >> 4) * 8 + (lane & 7), 2 * m + (lane >> 3 & 1)));
        ldmatrix_trans(x, sO + spot32(t + (lane & 15), 2 * half + (lane >> 4)));
        mma_bf16(got[0][0], a, x[0], x[1]);
        mma_bf16(got[0][1], a, x[2], x[3]);
      }
    for (int i = 0; i < 2; i++) {
      uint32_t two[2];
      for (int n = 0; n < 2; n++) {
        two[n] = pack(got[0][n][2 * i] + got[1][n][2 * i], got[0][n][2 * i + 1] + got[1][n][2 * i + 1]);
        *(uint32_t *)(sD + spot32(16 * m + gr + 8 * i, 2 * half + n) + t2) = two[n] ^ 0x80008000u;  // -dD
      }
      *(uint2 *)(d_writes + (record * C + 16 * m + gr + 8 * i) * V + block * BV + 16 * half + neighbours_column(lane)) =
          with_neighbours(two[0], two[1], lane);
    }
    if (has_keys) {
      for (int i = 0; i < 2; i++) {
        const float d = decay[key + 8 * i];
        u16 *to = d_states + (record * K + key + 8 * i) * V + block * BV + neighbours_column(lane);
        for (int n = 0; n < 4; n += 2)
          *(uint2 *)(to + 8 * n) = with_neighbours(pack(dS[n][2 * i], dS[n][2 * i + 1]), pack(dS[n + 1][2 * i], dS[n + 1][2 * i + 1]), lane);
        float flow = 0.0f;
        for (int n = 0; n < 4; n++) {
          uint32_t before = *(const uint32_t *)(sB + spot32(key + 8 * i, n) + t2);
          dS[n][2 * i] *= d, dS[n][2 * i + 1] *= d;
          flow += low(before) * dS[n][2 * i] + high(before) * dS[n][2 * i + 1];
        }
        flow += __shfl_xor_sync(~0u, flow, 1);
        flow += __shfl_xor_sync(~0u, flow, 2);
        if (t2 == 0) flows[(record * (V / BV) + block) * K + key + 8 * i] = flow;
      }
#pragma unroll
      for (int t = 0; t < C; t += 16) {
        uint32_t a[4], x[4], y[4];
        ldmatrix_trans(a, sF + spot<K>(t + (lane >> 4) * 8 + (lane & 7), 2 * w + (lane >> 3 & 1)));
        ldmatrix_trans(x, sO + spot32(t + (lane & 15), lane >> 4));
        ldmatrix_trans(y, sO + spot32(t + (lane & 15), 2 + (lane >> 4)));
        mma_bf16(dS[0], a, x[0], x[1]);
        mma_bf16(dS[1], a, x[2], x[3]);
        mma_bf16(dS[2], a, y[0], y[1]);
        mma_bf16(dS[3], a, y[2], y[3]);
      }
    }
    __syncthreads();
    if (has_keys) {
#pragma unroll
      for (int t = 0; t < C; t += 16) {
        uint32_t a[4], x[4], y[4];
        ldmatrix_trans(a, sW + spot<K>(t + (lane >> 4) * 8 + (lane & 7), 2 * w + (lane >> 3 & 1)));
        ldmatrix_trans(x, sD + spot32(t + (lane & 15), lane >> 4));
        ldmatrix_trans(y, sD + spot32(t + (lane & 15), 2 + (lane >> 4)));
        mma_bf16(dS[0], a, x[0], x[1]);
        mma_bf16(dS[1], a, x[2], x[3]);
        mma_bf16(dS[2], a, y[0], y[1]);
        mma_bf16(dS[3], a, y[2], y[3]);
      }
      round_state();
    }
  }
  if (has_keys)
    for (int n = 0; n < 4; n++)
      for (int i = 0; i < 2; i++)
        *(float2 *)(d_initial + state + (long long)(key + 8 * i) * V + column + 8 * n) = make_float2(dS[n][2 * i], dS[n][2 * i + 1]);
}
