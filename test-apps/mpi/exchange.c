/* An MPI program with its own check of the data: a ring, allreduce and alltoall in many sizes.
 *
 * Exit code 0 and the line "N ranks, 0 wrong" when every byte and every sum is right. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;

static void *allocate(size_t bytes)
{
	void *memory = malloc(bytes);
	if (!memory) {
		fprintf(stderr, "exchange: out of memory\n");
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	return memory;
}

/* What rank `from` sends at place `i` of a message of `size`. */
static unsigned char pattern(int from, int size, int i)
{
	return (unsigned char)(i * 7 + from * 13 + size);
}

/* Everybody sends to the right and receives from the left. */
static long ring(int size)
{
	int right = (rank + 1) % ranks, left = (rank + ranks - 1) % ranks;
	unsigned char *out = allocate(size), *in = allocate(size);
	long wrong = 0;

	for (int i = 0; i < size; i++)
		out[i] = pattern(rank, size, i);
	MPI_Sendrecv(out, size, MPI_BYTE, right, 1, in, size, MPI_BYTE, left, 1, MPI_COMM_WORLD,
		     MPI_STATUS_IGNORE);
	for (int i = 0; i < size; i++)
		wrong += in[i] != pattern(left, size, i);
	free(out);
	free(in);
	return wrong;
}

static long allreduce(int count)
{
	int *out = allocate(count * sizeof(int)), *in = allocate(count * sizeof(int));
	long wrong = 0;

	for (int i = 0; i < count; i++)
		out[i] = i + rank;
	MPI_Allreduce(out, in, count, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	for (int i = 0; i < count; i++)
		wrong += in[i] != ranks * i + ranks * (ranks - 1) / 2;
	free(out);
	free(in);
	return wrong;
}

static long alltoall(int count)
{
	size_t bytes = (size_t)ranks * count * sizeof(int);
	int *out = allocate(bytes), *in = allocate(bytes);
	long wrong = 0;

	for (int i = 0; i < ranks * count; i++)
		out[i] = rank * 1000003 + i;
	MPI_Alltoall(out, count, MPI_INT, in, count, MPI_INT, MPI_COMM_WORLD);
	for (int from = 0; from < ranks; from++)
		for (int i = 0; i < count; i++)
			wrong += in[from * count + i] != from * 1000003 + rank * count + i;
	free(out);
	free(in);
	return wrong;
}

int main(int argc, char **argv)
{
	long wrong = 0, all = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	for (int size = 1; size <= 1 << 20; size *= 4)
		wrong += ring(size);
	for (int count = 1; count <= 1 << 16; count *= 16)
		wrong += allreduce(count);
	for (int count = 1; count <= 1 << 14; count *= 16)
		wrong += alltoall(count);
	MPI_Allreduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	if (rank == 0)
		printf("%d ranks, %ld wrong\n", ranks, all);
	MPI_Finalize();
	return all != 0;
}
