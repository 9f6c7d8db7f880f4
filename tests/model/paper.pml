/*
 * The scheme of the bounded-lag paper, section III-C, read in its favour: batch j goes to buffer
 * j mod k of every peer with tag j mod k, and is complete after RANKS - 1 messages with that tag.
 * A put and its notification are one step, and a buffer is copied out at the moment of completion.
 *
 *   RANKS      world size
 *   BUFFERS    k
 *   UNDER_WAY  batches a rank may have started and not completed
 *   LOOK_AT    puts: a put must not meet unread data
 *              reads: a completion must read the right data
 */

#define BUFFER(from, to, batch) (((from) * RANKS + (to)) * BUFFERS + (batch) % BUFFERS)
#define TAG(rank, batch) ((rank) * BUFFERS + (batch) % BUFFERS)

byte started[RANKS];
byte completed[RANKS];
byte stamp[RANKS * RANKS * BUFFERS]; /* batch + 1 in the buffer, 0 before the first */
byte messages[RANKS * BUFFERS];      /* with this tag, not counted by a completion yet */
byte i;                              /* loop variable, 0 between steps */

mtype = { puts, reads };

proctype Rank(byte me) {
  byte peer = me; /* the one served; `me` between the calls */
  do
  :: d_step {
      peer == me && started[me] - completed[me] < UNDER_WAY -> peer = (me + 1) % RANKS
    }
  :: d_step {
      peer != me ->
      if
      :: LOOK_AT == puts && stamp[BUFFER(me, peer, started[me])] > completed[peer] ->
        printf("rank %d overwrites batch %d at rank %d, which has not read it, with batch %d\n", me,
               stamp[BUFFER(me, peer, started[me])] - 1, peer, started[me]);
        assert(false)
      :: else
      fi;
      printf("rank %d puts batch %d to rank %d, tag %d\n", me, started[me], peer,
             started[me] % BUFFERS);
      stamp[BUFFER(me, peer, started[me])] = started[me] + 1;
      messages[TAG(peer, started[me])]++;
      peer = (peer + 1) % RANKS;
      started[me] = (peer == me -> started[me] + 1 : started[me])
    }
  :: d_step {
      peer == me && completed[me] < started[me] &&
          messages[TAG(me, completed[me])] >= RANKS - 1 ->
      for (i : 0 .. RANKS - 1) {
        if
        :: LOOK_AT == reads && i != me &&
               stamp[BUFFER(i, me, completed[me])] != completed[me] + 1 ->
          printf("rank %d completes batch %d and reads ", me, completed[me]);
          if
          :: stamp[BUFFER(i, me, completed[me])] == 0 -> printf("nothing")
          :: else -> printf("batch %d", stamp[BUFFER(i, me, completed[me])] - 1)
          fi;
          printf(" of rank %d\n", i);
          assert(false)
        :: else
        fi
      }
      i = 0;
      printf("rank %d completes batch %d\n", me, completed[me]);
      messages[TAG(me, completed[me])] = messages[TAG(me, completed[me])] - (RANKS - 1);
      completed[me]++
    }
  od
}

init {
  atomic {
    for (i : 0 .. RANKS - 1) {
      run Rank(i)
    }
    i = 0
  }
}
